/** One device of the memory map: a bar to scale with marks for limit and pressure, and its bytes as a table. */

import { ACCOUNTS, PARTS, PART_NAMES, blocksOf, colorOf } from "../core/blocks.js";
import { bytes, missing, percent } from "../core/format.js";
import { html, useState } from "../vendor/preact-htm.js";
import { memo } from "./memo.js";
import { Status } from "./status.js";
import { Table } from "./table.js";

/** The name of a device, which begins with its node where there are several nodes. */
export const placeOf = ({ id, node }) => (node ? `${node} ${id}` : id);

const LABELED = 0.07; // share of the bar from which a block has room for its name

const width = (part, whole) => ({ width: `${(100 * part) / whole}%` });

function ModelBlock({ model, scale }) {
  return html`<div class=${`block color-${colorOf(model.id)}`} style=${width(model.bytes, scale)}
    title=${`${model.id}: ${bytes(model.bytes)}`}>
    ${PARTS.filter((part) => model.parts[part] > 0).map((part) => html`<div key=${part} class=${`part ${part}`}
      style=${width(model.parts[part], model.bytes)} title=${`${model.id}, ${PART_NAMES[part]}: ${bytes(model.parts[part])}`} />`)}
    ${model.bytes / scale >= LABELED && html`<span class="name">${model.id}</span>`}
  </div>`;
}

function Mark({ at, scale, label, kind }) {
  if (missing(at) || at <= 0 || at > scale) return null;
  const share = (100 * at) / scale;
  return html`<div class=${`mark ${kind} ${share > 70 ? "left" : ""}`} style=${{ left: `${share}%` }} title=${label}><span>${label}</span></div>`;
}

function Bar({ device, blocks }) {
  const { models, accounts, free, scale } = blocks;
  const contents = [
    ...models.map(({ id, bytes: size }) => `${id} ${bytes(size)}`),
    ...accounts.map(({ id, bytes: size }) => `${ACCOUNTS[id]} ${bytes(size)}`),
    `free ${bytes(free)}`,
  ].join(", ");
  const levels = Object.entries(device.pressure_levels || {});
  return html`<div class="memory" role="img" aria-label=${`${placeOf(device)}, ${bytes(device.total_bytes)}: ${contents}`}>
    <div class="marks above">
      <${Mark} at=${device.usable_bytes} scale=${scale} kind="limit" label=${`models up to ${bytes(device.usable_bytes)}`} />
      ${device.limit_bytes < device.total_bytes && device.limit_bytes !== device.usable_bytes && html`<${Mark} at=${device.limit_bytes} scale=${scale} kind="limit" label=${`limit ${bytes(device.limit_bytes)}`} />`}
    </div>
    <div class="bar">
      ${models.map((model) => html`<${ModelBlock} key=${`model ${model.id}`} model=${model} scale=${scale} />`)}
      ${accounts.map(({ id, bytes: size }) => html`<div key=${id} class=${`block ${id}`} style=${width(size, scale)}
        title=${`${ACCOUNTS[id]}: ${bytes(size)}`}>${size / scale >= LABELED && html`<span class="name">${ACCOUNTS[id]}</span>`}</div>`)}
    </div>
    <div class="marks">
      ${levels.map(([level, ratio]) => html`<div key=${level} class="tick" style=${{ left: `${100 * ratio}%` }} title=${`${level} pressure from ${percent(ratio)}`} />`)}
      <${Mark} at=${device.pressure_ratio * device.total_bytes} scale=${scale} kind="pressure" label=${`${device.pressure} pressure`} />
    </div>
  </div>`;
}

const NAMED = 12; // models below the bar; the table has all

const Holders = ({ models }) => html`<ul class="legend">
  ${models.slice(0, NAMED).map(({ id, bytes: size }) => html`<li key=${id}><span class=${`swatch weights color-${colorOf(id)}`} aria-hidden="true"></span>${id} <b>${bytes(size)}</b></li>`)}
  ${models.length > NAMED && html`<li>and ${models.length - NAMED} more</li>`}
</ul>`;

const part = (name) => ({
  key: name, label: PART_NAMES[name], numeric: true, cell: (row) => (row.parts && row.parts[name] ? bytes(row.parts[name]) : ""),
});
const COLUMNS = [
  { key: "id", label: "Held by", cell: (row) => row.label },
  ...PARTS.map(part),
  { key: "bytes", label: "all", numeric: true, cell: (row) => bytes(row.bytes) },
];

function rowsOf({ models, accounts, free }) {
  return [
    ...models.map((model) => ({ ...model, label: model.id })),
    ...accounts.map((account) => ({ ...account, label: ACCOUNTS[account.id] })),
    { id: "free", label: "free", bytes: free },
  ];
}

/** @param {{device: import("../core/types.js").Device, admin: boolean, onRecover: function(Object): void}} props */
export const DeviceMemory = memo(({ device, admin, onRecover }) => {
  const [open, setOpen] = useState(false);
  const blocks = blocksOf(device);
  const used = blocks.scale - blocks.free;
  const Heading = device.node ? "h3" : "h2";
  const heading = `device-${device.node || ""}-${device.id}`;
  return html`<section class="device" aria-labelledby=${heading}>
    <header>
      <${Heading} id=${heading}>${device.id} <span class="dim">${device.name}</span><//>
      <${Status} value=${device.state} />
      <${Status} value=${device.pressure} label=${`${device.pressure} pressure${missing(device.pressure_ratio) ? "" : `, ${percent(device.pressure_ratio)}`}`} />
      <span class="num grow"><b>${bytes(used)}</b> of ${bytes(device.total_bytes)} used, ${bytes(device.free_bytes)} free for models</span>
      ${admin && device.state !== "healthy" && html`<button type="button" onClick=${() => onRecover(device)}>Recover …</button>`}
    </header>
    ${device.reason && html`<p class="reason">${device.reason}</p>`}
    <${Bar} device=${device} blocks=${blocks} />
    ${blocks.models.length > 0 && html`<${Holders} models=${blocks.models} />`}
    <details onToggle=${(event) => setOpen(event.target.open)}>
      <summary>As a table</summary>
      ${open && html`<${Table} caption=${`Memory of ${placeOf(device)}`} hideCaption=${true} columns=${COLUMNS} rows=${rowsOf(blocks)} id=${(row) => row.label} />`}
    </details>
  </section>`;
});
