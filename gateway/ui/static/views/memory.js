/** The memory map: every device and the host, with the models on them. */

import * as api from "../core/api.js";
import { PART_NAMES } from "../core/blocks.js";
import { Confirm } from "../parts/dialog.js";
import { DeviceMemory } from "../parts/memory_bar.js";
import { Empty } from "../parts/status.js";
import { html, useCallback, useState } from "../vendor/preact-htm.js";

const LEGEND = [...Object.entries(PART_NAMES), ["cached", "stored sequences"], ["releasing", "releasing"], ["foreign", "other programs"], ["free", "free"]];

const Legend = () => html`<ul class="legend" aria-label="Patterns of the blocks">
  ${LEGEND.map(([name, label]) => html`<li key=${name}><span class=${`swatch color-0 part ${name}`} aria-hidden="true"></span>${label}</li>`)}
</ul>`;

function recovery(device) {
  return [
    `${device.id} is ${device.state}${device.reason ? `: ${device.reason}` : "."}`,
    "A helper process computes on the device. If that works, models may be loaded on it again.",
  ];
}

export function MemoryView({ state, admin }) {
  const [device, setDevice] = useState(null);
  const onRecover = useCallback(setDevice, []);
  return html`
    <p class="lead">Each bar is to scale for its device. A color is a model, a pattern says what its bytes are.</p>
    <${Legend} />
    ${state.devices.length
      ? state.devices.map((one) => html`<${DeviceMemory} key=${one.id} device=${one} admin=${admin} onRecover=${onRecover} />`)
      : html`<${Empty}>No devices are known yet: the inference service has not answered. Start it with <code>headgate up</code>.<//>`}
    ${device && html`<${Confirm} title=${`Recover ${device.id}`} verb=${`Recover ${device.id}`} sentences=${recovery(device)}
      run=${() => api.recoverDevice(device.id)} onClose=${() => setDevice(null)} />`}`;
}
