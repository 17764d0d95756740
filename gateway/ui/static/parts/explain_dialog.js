/** The explain record of one request: why each candidate was used, skipped or left. */

import * as api from "../core/api.js";
import { absolute, bytes, count, duration, missing } from "../core/format.js";
import { REASONS, TIERS } from "../core/words.js";
import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Dialog } from "./dialog.js";
import { Notice, Status } from "./status.js";
import { Table } from "./table.js";

const ATTEMPTS = [
  { key: "name", label: "Candidate", style: "id", cell: (one) => html`${one.name}${one.node && html`<span class="sub">on ${one.node}</span>`}` },
  { key: "outcome", label: "Outcome", cell: (one) => html`<${Status} value=${one.outcome} tone=${one.outcome === "success" ? "ok" : one.outcome === "ignored" ? "off" : "bad"} />` },
  { key: "seconds", label: "Time", numeric: true, cell: (one) => duration(one.seconds) },
  { key: "restored", label: "Restored", cell: (one) => (one.restored || []).map((row) => `${count(row.tokens)} tokens from ${row.tier}`).join(", ") || "–" },
  { key: "message", label: "Message", style: "wide", cell: (one) => one.message || "–" },
];
const BREAKS = [
  { key: "name", label: "Candidate", style: "id", cell: (one) => one.name },
  { key: "outcome", label: "Result", cell: (one) => one.outcome },
  { key: "message", label: "Why", style: "wide", cell: (one) => one.message },
];
const CHAIN = [
  { key: "name", label: "Candidate", style: "id", cell: (one) => html`${one.name}${one.chosen && html`<span class="sub">for ${one.chosen}</span>`}` },
  { key: "fate", label: "Decision", cell: (one) => html`<${Status} value=${one.fate} tone=${one.tone} />` },
  { key: "why", label: "Why", style: "wide", cell: (one) => one.why || "–" },
  { key: "facts", label: "Facts", style: "wide", cell: (one) => one.facts || "–" },
];

/** The known facts of a candidate as text. */
function factsOf(facts = {}) {
  const shown = [
    !missing(facts.prompt_tokens) && `${count(facts.prompt_tokens)} prompt tokens`,
    !missing(facts.context_length) && `context ${count(facts.context_length)}`,
    !missing(facts.expected_seconds) && `first token expected in ${duration(facts.expected_seconds)}`,
    !missing(facts.load_seconds) && `load ${duration(facts.load_seconds)}`,
    !missing(facts.queue_seconds) && `queue ${duration(facts.queue_seconds)}`,
    facts.fits === false && (facts.fit_reason || "does not fit"),
    facts.likely_failure && `likely failure: ${facts.likely_failure}`,
    !missing(facts.breaker_open_for) && `breaker open for ${duration(facts.breaker_open_for)}`,
  ];
  return shown.filter(Boolean).join("; ");
}

function chainOf(record) {
  const standsFor = Object.fromEntries(Object.entries(record.chosen || {}).map(([entry, name]) => [name, entry]));
  return (record.chain || []).map((name) => {
    const tried = (record.attempts || []).filter((attempt) => attempt.name === name);
    const reason = (record.dropped || {})[name];
    const code = reason && reason.split(":")[0];
    const [fate, tone] = name === record.answered_by ? ["answered", "ok"] : reason ? ["skipped", "warn"] : tried.length ? ["failed", "bad"] : ["not needed", "off"];
    const why = reason ? `${reason}${REASONS[code] && reason === code ? `: ${REASONS[code]}` : ""}` : tried.length ? tried[tried.length - 1].message : "";
    return { name, fate, tone, why, chosen: standsFor[name], facts: factsOf((record.considered || {})[name]) };
  });
}

function summary(record) {
  return [
    ["Outcome", `${record.status || ""} ${record.outcome}`.trim()],
    ["Error", record.error],
    ["Field", record.param],
    ["Answered by", record.answered_by && `${record.answered_by}${record.node ? ` on ${record.node}` : ""} (${record.tier}: ${TIERS[record.tier] || record.tier})`],
    ["First choice", record.reason && record.reason !== "none" ? `did not answer: ${record.reason}${REASONS[record.reason] ? `, ${REASONS[record.reason]}` : ""}` : "answered"],
    ["Started", absolute(record.started)],
    ["Endpoint", `${record.endpoint}${record.stream ? ", streamed" : ""}`],
    ["Model", record.route && record.route !== record.model ? `${record.model}, route ${record.route}` : record.model],
    ["Key", record.key && `${record.key}, priority ${record.priority}`],
    ["Needs", (record.needs || []).join(", ")],
    ["Size", `${record.size_bytes < 2 ** 20 ? `${count(record.size_bytes)} bytes` : bytes(record.size_bytes)}${missing(record.max_tokens) ? "" : `, at most ${count(record.max_tokens)} tokens`}`],
    ["Clouds", record.cloud_allowed ? "allowed" : "not allowed"],
    ["First token", duration(record.first_token_seconds)],
    ["Total", `${duration(record.total_seconds)}, of it ${duration(record.overhead_seconds)} in the gateway itself`],
    ["Resumed", (record.hops || []).join("; ")],
  ].filter(([, value]) => value);
}

function Record({ record }) {
  return html`
    <dl class="facts">${summary(record).map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>
    <h3>Candidates</h3>
    <${Table} caption="Candidates" hideCaption=${true} columns=${CHAIN} rows=${chainOf(record)} id=${(one) => one.name} empty="The request was refused before it had a route." />
    ${(record.attempts || []).length > 0 && html`<h3>Attempts</h3>
      <${Table} caption="Attempts" hideCaption=${true} columns=${ATTEMPTS} rows=${record.attempts.map((one, index) => ({ ...one, index }))} id=${(one) => one.index} />`}
    ${(record.breaks || []).length > 0 && html`<h3>Breaks</h3>
      <${Table} caption="Breaks of the answer" hideCaption=${true} columns=${BREAKS} rows=${record.breaks.map((one, index) => ({ ...one, index }))} id=${(one) => one.index} />`}
    <details><summary>Record as JSON</summary><pre tabindex="0">${JSON.stringify(record, null, 2)}</pre></details>`;
}

/** @param {{id: string, onClose: function(): void}} props */
export function ExplainDialog({ id, onClose }) {
  const [answer, setAnswer] = useState({});
  useEffect(() => {
    let wanted = true;
    api.explain(id).then((record) => wanted && setAnswer({ record }), (error) => wanted && setAnswer({ error: error.message }));
    return () => { wanted = false; };
  }, [id]);
  return html`<${Dialog} title=${`Request ${id}`} onClose=${onClose} wide=${true}>
    ${answer.error && html`<${Notice} tone="bad" live=${true}>${answer.error}<//>`}
    ${!answer.error && !answer.record && html`<p class="dim">Reading the record …</p>`}
    ${answer.record && html`<${Record} record=${answer.record} />`}
  <//>`;
}
