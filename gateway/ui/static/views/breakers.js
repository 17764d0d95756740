/** Circuit breakers: what is open, until when, and why. */

import * as api from "../core/api.js";
import { count, missing } from "../core/format.js";
import { READ_ONLY } from "../core/words.js";
import { Confirm } from "../parts/dialog.js";
import { Status } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { Until } from "../parts/time.js";
import { html, useMemo, useState } from "../vendor/preact-htm.js";

const RANK = { open: 0, "half-open": 1, closed: 2 };
const windowOf = (breaker) => breaker.window || {};

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { key: "name", label: "Breaker", style: "id", cell: (one) => one.name, sort: (one) => one.name },
  { key: "state", label: "State", cell: (one) => html`<${Status} value=${one.state} />`, sort: (one) => RANK[one.state] },
  {
    key: "until", label: "Probe", numeric: true, hint: "when an open breaker lets one request or probe through",
    cell: (one) => (missing(one.opens_until) ? (one.probing ? "running" : "–") : html`<${Until} at=${one.opens_until} />`),
    sort: (one) => one.opens_until,
  },
  { key: "failures", label: "Failures in a row", numeric: true, cell: (one) => count(one.failures), sort: (one) => one.failures },
  {
    key: "window", label: "Last minute", numeric: true, hint: "failed of all attempts",
    cell: (one) => `${count(windowOf(one).failed || 0)} of ${count((windowOf(one).failed || 0) + (windowOf(one).succeeded || 0))} failed`,
    sort: (one) => windowOf(one).failed || 0,
  },
  { key: "source", label: "Opened by", cell: (one) => one.source || "–" },
  { key: "ramp", label: "Ramp", numeric: true, hint: "concurrent attempts after a recovery", cell: (one) => (missing(one.ramp) ? "–" : count(one.ramp)) },
  { key: "last", label: "Last failure", style: "wide", cell: (one) => one.last_failure || "–" },
  {
    key: "actions", label: "Actions", style: "actions",
    cell: (one, context) => context.admin && html`<button type="button" onClick=${() => context.reset(one)}>Reset …<span class="unseen"> ${one.name}</span></button>`,
  },
];
const READABLE = COLUMNS.filter(({ key }) => key !== "actions");

const NONE_YET = html`No breakers yet: a breaker exists from the first request to its provider. Send one with
  <code>headgate run demo "What is a circuit breaker?"</code> or in the <a href="#/playground">playground</a>.`;

function sentences(breaker) {
  return [
    `${breaker.name} is ${breaker.state}${breaker.last_failure ? `; last failure: ${breaker.last_failure}` : "."}`,
    "It closes at once, and its counted failures are forgotten.",
    "Requests go to it again; if it still fails, it opens again.",
  ];
}

export function BreakersView({ state, admin }) {
  const [chosen, setChosen] = useState(null);
  const context = useMemo(() => ({ admin, reset: setChosen }), [admin]);
  const breakers = [...state.breakers.values()].sort((a, b) => RANK[a.state] - RANK[b.state] || (a.name < b.name ? -1 : 1));
  return html`
    ${!admin && html`<p class="lead">${READ_ONLY}</p>`}
    <${Table} caption="Breakers" hideCaption=${true} columns=${admin ? COLUMNS : READABLE} rows=${breakers} id=${(one) => one.name} context=${context} empty=${NONE_YET} />
    ${chosen && html`<${Confirm} title=${`Reset ${chosen.name}`} verb=${`Reset ${chosen.name}`} sentences=${sentences(chosen)}
      run=${() => api.resetBreaker(chosen.name)} onClose=${() => setChosen(null)} />`}`;
}
