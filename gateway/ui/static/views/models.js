/** Every model with its figures, and the actions on it. */

import { bytes, count, duration, missing, percent, rate } from "../core/format.js";
import { modelKey } from "../core/reducer.js";
import { ACTIONS, READ_ONLY } from "../core/words.js";
import { ActionDialog } from "../parts/action_dialog.js";
import { Status } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { Until } from "../parts/time.js";
import { html, useMemo, useState } from "../vendor/preact-htm.js";

const figure = (model, name) => (model.figures || {})[name];
const status = (model) => model.headgate || {};

/** Only a model on a device has a speed. */
const speed = (model) => (ON_DEVICE.has(status(model).state) ? figure(model, "tokens_per_second") : null);

function kvHits({ kv } = {}) {
  if (!kv) return "–";
  return html`<span title="hits in slots / host memory / disk">${["hot", "ram", "disk"].map((tier) => count(kv[tier] || 0)).join(" / ")}</span>`;
}

function where(model) {
  const { devices = [], reason } = status(model);
  if (devices.length) return html`<span class="sub">${devices.join(", ")}</span>`;
  return reason ? html`<span class="sub" title=${reason}>${reason}</span>` : null;
}

function stateOf(model) {
  const { state } = status(model);
  return state === "loading" && !missing(model.progress) ? `loading ${Math.round(100 * model.progress)} %` : state;
}

const ON_DEVICE = new Set(["ready", "busy", "loading", "restoring", "draining"]);
const likely = (model) => (ON_DEVICE.has(status(model).state) ? "unload" : "load");

function Buttons({ model, context }) {
  const [key, name] = [modelKey(model), model.node ? `${model.id} on ${model.node}` : model.id];
  if (!context.admin) return html`<button type="button" onClick=${() => context.open(key, null)}>Details<span class="unseen"> of ${name}</span></button>`;
  const action = likely(model);
  return html`<span class="pair">
    <button type="button" onClick=${() => context.open(key, action)}>${ACTIONS[action].label} …<span class="unseen"> ${name}</span></button>
    <button type="button" onClick=${() => context.open(key, null)}>More …<span class="unseen"> about ${name}</span></button>
  </span>`;
}

const number = (key, label, cell, sort, hint) => ({ key, label, numeric: true, cell, sort, hint });

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { key: "id", label: "Model", style: "id", cell: (model) => model.id, sort: (model) => model.id },
  {
    key: "state", label: "State", sort: (model) => status(model).state,
    cell: (model) => html`<${Status} value=${status(model).state} label=${stateOf(model)} />${where(model)}`,
  },
  number("predicted", "Predicted", (model) => bytes(status(model).predicted_bytes), (model) => status(model).predicted_bytes, "bytes estimated before the load"),
  number("real", "Real", (model) => bytes(status(model).actual_bytes), (model) => status(model).actual_bytes, "bytes booked since the load was measured"),
  number("in_flight", "In flight", (model) => count(status(model).in_flight || 0), (model) => status(model).in_flight || 0),
  number("queue", "Queue", (model) => count(status(model).queued || 0), (model) => status(model).queued || 0),
  number("rate", "Tokens/s", (model) => rate(speed(model)), speed),
  number("p50", "TTFT p50", (model) => duration(figure(model, "ttft_p50")), (model) => figure(model, "ttft_p50"), "time to first token, median of the last five minutes"),
  number("p99", "TTFT p99", (model) => duration(figure(model, "ttft_p99")), (model) => figure(model, "ttft_p99"), "time to first token, 99th percentile of the last five minutes"),
  number("prefix", "Prefix hits", (model) => percent(figure(model, "prefix_hit_ratio")), (model) => figure(model, "prefix_hit_ratio"), "share of prompts that continued computed tokens"),
  number("kv", "KV hits", (model) => kvHits(model.figures), null, "prompts continued from slots / host memory / disk"),
  number("idle", "Leaves", (model) => (missing(model.idle_until) ? "–" : html`<${Until} at=${model.idle_until} />`), (model) => model.idle_until, "when it is unloaded or offloaded if it stays idle"),
  { key: "actions", label: "Actions", style: "actions", cell: (model, context) => html`<${Buttons} model=${model} context=${context} />` },
];

const OF_NODE = {
  key: "node", label: "Node", sort: (model) => model.node,
  cell: (model, context) => html`${model.node}${context.down.has(model.node) && html`<${Status} value="does not answer" tone="bad" />`}`,
};
const [OF_ID, OF_STATE, ...FURTHER] = COLUMNS;
const WITH_NODE = [OF_ID, OF_STATE, OF_NODE, ...FURTHER];

const NO_MODELS = html`No models yet. Add a file with <code>headgate add FILE.gguf</code>, or download one with
  <code>headgate pull hf:ORGANIZATION/REPOSITORY:QUANTIZATION</code>.`;

const matches = (model, words) => words.every((word) =>
  `${model.id} ${model.node || ""} ${status(model).state} ${(status(model).aliases || []).join(" ")} ${(status(model).devices || []).join(" ")}`.toLowerCase().includes(word));

export function ModelsView({ state, admin }) {
  const [filter, setFilter] = useState("");
  const [chosen, setChosen] = useState(null);
  const { nodes } = state.inference;
  const context = useMemo(() => ({
    admin, down: new Set(nodes.filter((node) => node.reachable === false).map(({ name }) => name)),
    open: (key, action) => setChosen({ key, action }),
  }), [admin, nodes]);
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const hasNodes = nodes.length > 0;
  const models = [...state.models.values()];
  if (hasNodes) models.sort((a, b) => (a.id < b.id ? -1 : a.id > b.id ? 1 : a.node < b.node ? -1 : 1));
  const shown = words.length ? models.filter((model) => matches(model, words)) : models;
  const model = chosen && state.models.get(chosen.key);
  return html`
    ${!admin && html`<p class="lead">${READ_ONLY}</p>`}
    <p class="field inline"><label for="model-filter">Filter</label>
      <input id="model-filter" type="search" value=${filter} placeholder=${hasNodes ? "name, node, state or device" : "name, state or device"} onInput=${(event) => setFilter(event.target.value)} />
      <span class="dim">${count(shown.length)} of ${count(models.length)}</span></p>
    <${Table} name="models" caption="Models" hideCaption=${true} columns=${hasNodes ? WITH_NODE : COLUMNS} rows=${shown} id=${modelKey} context=${context}
      empty=${models.length ? "No model matches the filter." : NO_MODELS} />
    ${model && html`<${ActionDialog} key=${chosen.key} model=${model} devices=${state.devices.filter((device) => device.node === model.node)} first=${chosen.action} admin=${admin}
      onClose=${() => setChosen(null)} />`}`;
}
