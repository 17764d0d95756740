/** One model: its facts, and the actions, each of which shows its plan before it can be confirmed. */

import * as api from "../core/api.js";
import { bytes, count, missing, plural } from "../core/format.js";
import { ACTIONS, READ_ONLY } from "../core/words.js";
import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Dialog } from "./dialog.js";
import { Notice, Status } from "./status.js";

function facts(model) {
  const status = model.headgate || {};
  return [
    ["State", html`<${Status} value=${status.state} />`],
    ["Devices", (status.devices || []).join(", ") || "none"],
    ["Reason", status.reason],
    ["Also known as", (status.aliases || []).join(", ")],
    ["Context", `${plural(status.context_length || 0, "token")} per request, ${plural(status.parallel || 1, "request")} at once`],
    ["Memory", `${bytes(status.predicted_bytes)} predicted, ${bytes(status.actual_bytes)} real`],
    ["Can do", (status.capabilities || []).join(", ")],
    ["Loads", count(status.loads)],
    ["Process", missing(status.pid) ? null : `pid ${status.pid}`],
    ["Reduced", (status.reduced || []).join(", ")],
    ["Growth", (status.growth || []).join(" ")],
    ["Replicas", (status.replicas || []).map((one) => `${one.id}: ${one.state}`).join(", ")],
    ["Template", status.template_problem],
  ].filter(([, value]) => value);
}

/** The plan of the chosen action; a newer choice discards the answer to an older one. */
function usePlan(id, action, device, node) {
  const [plan, setPlan] = useState(null);
  useEffect(() => {
    const nowhere = action === "move" && !device;
    setPlan(nowhere ? { allowed: false, sentences: [`There is no other device for ${id}.`] } : null);
    if (!action || nowhere) return undefined;
    const control = new AbortController();
    api.plan({ model: id, action, device: device || undefined, node }, control.signal).then(setPlan, (error) => {
      if (error.name !== "AbortError") setPlan({ allowed: false, sentences: [error.message] });
    });
    return () => control.abort();
  }, [id, action, device, node]);
  return plan;
}

function Plan({ plan, action, id, running, onConfirm }) {
  if (!plan) return html`<p class="dim">Working out the plan …</p>`;
  return html`
    <h3>Plan</h3>
    <ul class="sentences">${plan.sentences.map((sentence) => html`<li>${sentence}</li>`)}</ul>
    ${plan.allowed
      ? html`<p class="buttons"><button type="button" class="main" disabled=${running} onClick=${onConfirm}>
          ${running ? "Working …" : `${ACTIONS[action].label} ${id}`}</button></p>`
      : html`<${Notice} tone="warn">This cannot be done now.<//>`}`;
}

function Actions({ model, devices, first }) {
  const { id, node } = model;
  const [action, setAction] = useState(first);
  const [device, setDevice] = useState("");
  const [result, setResult] = useState({ running: false });
  const target = action === "move" ? device : "";
  const plan = usePlan(id, action, target, node);
  const held = (model.headgate || {}).devices || [];
  const choices = devices.filter((one) => !(held.length === 1 && held[0] === one.id));

  function choose(name) {
    setAction(name);
    setResult({ running: false });
    if (name === "move") setDevice((choices.find((one) => !held.includes(one.id)) || { id: "" }).id);
  }

  async function confirm() {
    setResult({ running: true });
    try {
      await api.act({ model: id, action, device: target || undefined, node });
      setResult({ running: false, done: `${ACTIONS[action].label}: done.` });
    } catch (error) {
      setResult({ running: false, error: error.message });
    }
  }

  return html`<fieldset class="choices" disabled=${result.running}>
      <legend>Action</legend>
      ${Object.entries(ACTIONS).map(([name, { label, does }]) => html`<label key=${name} title=${does}>
        <input type="radio" name="action" value=${name} checked=${action === name} onChange=${() => choose(name)} />
        <span>${label}</span></label>`)}
    </fieldset>
    ${action === "move" && html`<p class="field"><label for="action-device">Device</label>
      <select id="action-device" value=${device} disabled=${result.running} onChange=${(event) => setDevice(event.target.value)}>
        ${choices.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
      </select></p>`}
    <div aria-live="polite">
      ${action && !result.done && html`<${Plan} plan=${plan} action=${action} id=${id} running=${result.running} onConfirm=${confirm} />`}
      ${result.running && html`<p class="dim">You may close this dialog: the action continues.</p>`}
      ${result.error && html`<${Notice} tone="bad">${result.error}<//>`}
      ${result.done && html`<${Notice} tone="ok">${result.done}<//>`}
    </div>`;
}

/**
 * @param {Object} props
 * @param {import("../core/types.js").Model} props.model  as it is now
 * @param {import("../core/types.js").Device[]} props.devices
 * @param {?string} props.first  the action chosen at first
 * @param {boolean} props.admin
 * @param {function(): void} props.onClose
 */
export function ActionDialog({ model, devices, first, admin, onClose }) {
  return html`<${Dialog} title=${model.node ? `${model.id} on ${model.node}` : model.id} onClose=${onClose}>
    <dl class="facts">${facts(model).map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>
    ${admin ? html`<${Actions} model=${model} devices=${devices} first=${first} />` : html`<p class="dim">${READ_ONLY}</p>`}
  <//>`;
}
