/** What happened: states, loads, evictions, device errors, crashes, breakers; and the last log lines. */

import { count } from "../core/format.js";
import { READ_ONLY } from "../core/words.js";
import { Empty, Status } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { html, useState } from "../vendor/preact-htm.js";

const KINDS = ["state", "load", "eviction", "device", "crash", "breaker", "pressure"];

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { key: "at", label: "When", style: "when", cell: (entry) => html`<${Ago} at=${entry.at} />` },
  { key: "kind", label: "Kind", cell: (entry) => html`<${Status} value=${entry.severity} label=${entry.kind} />` },
  { key: "subject", label: "Subject", style: "id", cell: (entry) => entry.subject },
  { key: "text", label: "What", style: "wide", cell: (entry) => entry.text },
];

const LOG = [
  { key: "at", label: "When", style: "when", cell: (line) => html`<${Ago} at=${line.at} />` },
  { key: "level", label: "Level", cell: (line) => html`<${Status} value=${line.level.toLowerCase()} />` },
  { key: "logger", label: "From", style: "id", cell: (line) => line.logger },
  { key: "text", label: "Text", style: "wide mono", cell: (line) => line.text },
];

function Kinds({ chosen, onChange }) {
  return html`<fieldset class="choices"><legend>Kinds</legend>
    ${KINDS.map((kind) => html`<label key=${kind}><input type="checkbox" checked=${chosen.has(kind)}
      onChange=${() => onChange(kind)} /><span>${kind}</span></label>`)}</fieldset>`;
}

export function TimelineView({ state, admin }) {
  const [chosen, setChosen] = useState(() => new Set(KINDS));
  const [filter, setFilter] = useState("");
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);

  function toggle(kind) {
    const next = new Set(chosen);
    if (!next.delete(kind)) next.add(kind);
    setChosen(next);
  }

  const matches = (entry) => (chosen.has(entry.kind) || !KINDS.includes(entry.kind))
    && words.every((word) => `${entry.subject} ${entry.text}`.toLowerCase().includes(word));
  const entries = state.timeline.filter(matches).reverse();
  const lines = [...state.log].reverse();
  return html`
    <div class="filters"><${Kinds} chosen=${chosen} onChange=${toggle} />
      <p class="field inline"><label for="timeline-filter">Filter</label>
        <input id="timeline-filter" type="search" value=${filter} placeholder="subject or text" onInput=${(event) => setFilter(event.target.value)} />
        <span class="dim">${count(entries.length)} of ${count(state.timeline.length)}</span></p></div>
    <${Table} name="timeline" caption="Timeline, newest first" hideCaption=${true} columns=${COLUMNS} rows=${entries} id=${(entry) => entry.key}
      empty=${state.timeline.length ? "No entry matches the filter." : "Nothing happened yet. Loads, evictions, device errors and crashes appear here."} />
    <section aria-labelledby="log"><h2 id="log">Log, warnings and errors</h2>
      ${admin
        ? html`<${Table} name="log" caption="Log lines, newest first" hideCaption=${true} columns=${LOG} rows=${lines} id=${(line) => line.key} empty="No warnings and no errors." />`
        : html`<${Empty}>${READ_ONLY} Log lines are left out.<//>`}</section>`;
}
