/** Requests: the running ones by phase, and the finished ones with their explain records. */

import { count, duration, missing, rate } from "../core/format.js";
import { address } from "../core/router.js";
import { phaseText } from "../core/words.js";
import { ExplainDialog } from "../parts/explain_dialog.js";
import { Status } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { Ago, Elapsed } from "../parts/time.js";
import { html, useState } from "../vendor/preact-htm.js";

const modelOf = (request) => (request.route && request.route !== request.model ? `${request.model} (route ${request.route})` : request.model || request.route);

function Phase({ request }) {
  const { phase, done, total } = request;
  const whole = phase === "loading" ? 100 : total;
  const bar = (phase === "prefill" || phase === "loading") && whole && !missing(done);
  return html`<span class="phase">${phaseText(request, count)}
    ${bar && html`<progress max=${whole} value=${done} aria-label=${phase}></progress>`}</span>`;
}

/** @type {import("../parts/table.js").Column[]} */
const LIVE = [
  { key: "model", label: "Model", style: "id", cell: modelOf },
  { key: "phase", label: "Phase", cell: (one) => html`<${Phase} request=${one} />` },
  { key: "elapsed", label: "Running for", numeric: true, cell: (one) => html`<${Elapsed} at=${one.started} />` },
  { key: "by", label: "Candidate", style: "id", cell: (one) => one.answered_by || "–" },
  { key: "tokens", label: "In / out", hint: "tokens of prompt and answer", numeric: true, cell: tokens },
  { key: "attempts", label: "Attempts", numeric: true, cell: (one) => count(one.attempts || 0) },
  { key: "key", label: "Key", cell: (one) => one.key || "–" },
  { key: "id", label: "Request", style: "id", cell: (one) => html`<span class="sub cut" title=${one.id}>${one.id}</span>` },
];

function tokens({ prompt_tokens: prompt, completion_tokens: completion }) {
  return missing(prompt) && missing(completion) ? "–" : `${count(prompt)} / ${count(completion)}`;
}

const failed = (request) => request.outcome === "broken" || (request.outcome !== "success" && (request.status || 0) >= 400);

function outcomeTone(request) {
  if (failed(request)) return "bad";
  return request.outcome === "success" || !request.outcome ? "ok" : "warn";
}

function Outcome({ request }) {
  const text = request.status ? `${request.status} ${request.outcome || ""}` : request.outcome || "–";
  return html`<${Status} value=${text} tone=${outcomeTone(request)} />`;
}

/** @type {import("../parts/table.js").Column[]} */
const FINISHED = [
  { key: "model", label: "Model", style: "id", cell: modelOf },
  { key: "outcome", label: "Outcome", cell: (one) => html`<${Outcome} request=${one} />` },
  { key: "by", label: "Answered by", style: "id", cell: (one) => html`${one.answered_by || "–"}<span class="sub">${one.tier}${one.reason && one.reason !== "none" ? `, ${one.reason}` : ""}</span>` },
  { key: "attempts", label: "Attempts", numeric: true, cell: (one) => count(one.attempts || 0), sort: (one) => one.attempts || 0 },
  { key: "ttft", label: "TTFT", numeric: true, cell: (one) => duration(one.ttft_seconds), sort: (one) => one.ttft_seconds },
  { key: "time", label: "Total", numeric: true, cell: (one) => duration(one.total_seconds), sort: (one) => one.total_seconds },
  { key: "tokens", label: "In / out", hint: "tokens of prompt and answer", numeric: true, cell: tokens },
  { key: "rate", label: "Tokens/s", numeric: true, cell: (one) => rate(one.tokens_per_second), sort: (one) => one.tokens_per_second },
  { key: "key", label: "Key", cell: (one) => one.key || "–" },
  { key: "started", label: "Started", numeric: true, cell: (one) => html`<${Ago} at=${one.started} />`, sort: (one) => one.started },
  {
    key: "explain", label: "Record", style: "actions",
    cell: (one) => html`<a class="button" href=${address("requests", one.id)}>Explain<span class="unseen"> request ${one.id}</span></a>`,
  },
];

const EXAMPLE = html`No requests yet. Send one with <code>headgate run demo "What is Headgate?"</code> or in the
  <a href="#/playground">playground</a>.`;

const texts = (one) => `${one.id} ${one.model} ${one.route} ${one.key} ${one.outcome} ${one.status} ${one.tier} ${one.answered_by} ${one.reason}`.toLowerCase();

export function RequestsView({ state, admin, parts }) {
  const [filter, setFilter] = useState("");
  const [only, setOnly] = useState(false);
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const live = [...state.live.values()];
  const all = [...state.finished.values()].reverse();
  const shown = all.filter((one) => (!only || failed(one)) && words.every((word) => texts(one).includes(word)));
  return html`
    ${!admin && html`<p class="lead">This key has no scope “admin”, so only its own requests are shown.</p>`}
    <section aria-labelledby="running"><h2 id="running">Running <span class="dim">${count(live.length)}</span></h2>
      <${Table} name="live" caption="Running requests" hideCaption=${true} columns=${LIVE} rows=${live} id=${(one) => one.id} empty="No request is running." /></section>
    <section aria-labelledby="finished"><h2 id="finished">Finished <span class="dim">the last ${count(all.length)}</span></h2>
      <p class="field inline"><label for="request-filter">Filter</label>
        <input id="request-filter" type="search" value=${filter} placeholder="model, key, tier, id" onInput=${(event) => setFilter(event.target.value)} />
        <label class="check"><input type="checkbox" checked=${only} onChange=${(event) => setOnly(event.target.checked)} /> failed only</label></p>
      <${Table} name="finished" caption="Finished requests" hideCaption=${true} columns=${FINISHED} rows=${shown} id=${(one) => one.id}
        empty=${all.length ? "No request matches the filter." : EXAMPLE} /></section>
    ${parts[1] && html`<${ExplainDialog} key=${parts[1]} id=${parts[1]} onClose=${() => { location.hash = address("requests"); }} />`}`;
}
