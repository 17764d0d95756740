/** The memory map: every device and the host, with the models on them. */

import * as api from "../core/api.js";
import { PART_NAMES } from "../core/blocks.js";
import { plural } from "../core/format.js";
import { Confirm } from "../parts/dialog.js";
import { DeviceMemory, placeOf } from "../parts/memory_bar.js";
import { Empty, Status } from "../parts/status.js";
import { Since } from "../parts/time.js";
import { html, useCallback, useState } from "../vendor/preact-htm.js";

const LEGEND = [...Object.entries(PART_NAMES), ["cached", "stored sequences"], ["releasing", "releasing"], ["foreign", "other programs"], ["free", "free"]];

const Legend = () => html`<ul class="legend" aria-label="Patterns of the blocks">
  ${LEGEND.map(([name, label]) => html`<li key=${name}><span class=${`swatch color-0 part ${name}`} aria-hidden="true"></span>${label}</li>`)}
</ul>`;

function recovery(device) {
  return [
    `${placeOf(device)} is ${device.state}${device.reason ? `: ${device.reason}` : "."}`,
    "A helper process computes on the device. If that works, models may be loaded on it again.",
  ];
}

/** The devices of one of several nodes; those of a node that does not answer are as they were. */
function NodeMemory({ node, devices, ...rest }) {
  const heading = `node-${node.name}`;
  return html`<section class="node" aria-labelledby=${heading}>
    <header><h2 id=${heading}>${node.name}</h2>
      <${Status} value=${node.reachable ? "answers" : "does not answer"} tone=${node.reachable ? "ok" : "bad"} />
      <span class="dim">${node.reachable === false && html`since <${Since} at=${node.since} />, `}${plural(devices.length, "device")}, ${node.url}</span></header>
    <div class=${node.reachable ? undefined : "stale"}>
      ${devices.map((one) => html`<${DeviceMemory} key=${one.id} device=${one} ...${rest} />`)}</div>
  </section>`;
}

export function MemoryView({ state, admin }) {
  const [device, setDevice] = useState(null);
  const onRecover = useCallback(setDevice, []);
  const { nodes } = state.inference;
  return html`
    <p class="lead">Each bar is to scale for its device. A color is a model, a pattern says what its bytes are.</p>
    <${Legend} />
    ${nodes.length ? nodes.map((node) => html`<${NodeMemory} key=${node.name} node=${node} admin=${admin} onRecover=${onRecover}
        devices=${state.devices.filter((device) => device.node === node.name)} />`) : state.devices.length
      ? state.devices.map((one) => html`<${DeviceMemory} key=${one.id} device=${one} admin=${admin} onRecover=${onRecover} />`)
      : html`<${Empty}>No devices are known yet: the inference service has not answered. Start it with <code>headgate up</code>.<//>`}
    ${device && html`<${Confirm} title=${`Recover ${placeOf(device)}`} verb=${`Recover ${placeOf(device)}`} sentences=${recovery(device)}
      run=${() => api.recoverDevice(device)} onClose=${() => setDevice(null)} />`}`;
}
