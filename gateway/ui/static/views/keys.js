/** API keys with their limits, and the usage by key, model and day. */

import * as api from "../core/api.js";
import { count, missing } from "../core/format.js";
import { READ_ONLY } from "../core/words.js";
import { Empty, Notice } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { html, useCallback, useEffect, useState } from "../vendor/preact-htm.js";

const words = (name) => name.replace(/_/g, " ");

function plain(value) {
  if (missing(value)) return "–";
  if (Array.isArray(value)) return value.join(", ") || "–";
  if (typeof value === "object") {
    return Object.entries(value).filter(([, part]) => !missing(part)).map(([name, part]) => `${words(name)} ${plain(part)}`).join("; ") || "none";
  }
  return typeof value === "number" ? (Number.isInteger(value) ? count(value) : value.toFixed(3)) : String(value);
}

/** A column for each field of the first row, so that fields of a later gateway are shown too. */
function columnsOf(rows, first) {
  const names = [first, ...Object.keys(rows[0] || {}).filter((name) => name !== first)];
  return names.map((name) => ({
    key: name, label: words(name), numeric: typeof (rows[0] || {})[name] === "number",
    cell: (row) => plain(row[name]), sort: (row) => (typeof row[name] === "object" ? null : row[name]),
  }));
}

/** An answer of the gateway, read when the view opens and by the button. */
function useAnswer(read, dependencies) {
  const [answer, setAnswer] = useState({});
  const load = useCallback(() => {
    setAnswer((old) => ({ ...old, loading: true }));
    read().then((value) => setAnswer({ value }), (error) => setAnswer({ error }));
  }, dependencies);
  useEffect(load, [load]);
  return [answer, load];
}

function Rows({ answer, field, first, caption, empty }) {
  if (answer.error) {
    return answer.error.status === 404
      ? html`<${Empty}>This gateway does not store usage.<//>`
      : html`<${Notice} tone="bad" live=${true}>${answer.error.message}<//>`;
  }
  if (!answer.value) return html`<p class="dim">Reading …</p>`;
  const rows = answer.value[field] || [];
  return html`<${Table} caption=${caption} hideCaption=${true} columns=${columnsOf(rows, first)} rows=${rows} id=${(row) => row[first]} empty=${empty} />`;
}

function Usage() {
  const [by, setBy] = useState("key");
  const [answer, load] = useAnswer(() => api.usage(by), [by]);
  return html`<section aria-labelledby="usage"><h2 id="usage">Usage</h2>
    <div class="filters"><fieldset class="choices"><legend>By</legend>
      ${["key", "model", "day"].map((name) => html`<label key=${name}><input type="radio" name="by" checked=${by === name} onChange=${() => setBy(name)} /><span>${name}</span></label>`)}
    </fieldset><button type="button" disabled=${answer.loading} onClick=${load}>Read again</button></div>
    <${Rows} key=${by} answer=${answer} field="rows" first=${by} caption=${`Usage by ${by}`} empty="No usage is stored yet." /></section>`;
}

function Keys() {
  const [answer, load] = useAnswer(api.keys, []);
  return html`<section aria-labelledby="keys"><h2 id="keys">Keys</h2>
    <p class="buttons"><button type="button" disabled=${answer.loading} onClick=${load}>Read again</button>
      <span class="dim">Create one with <code>headgate key create NAME</code>.</span></p>
    <${Rows} answer=${answer} field="keys" first="name" caption="Keys" empty=${html`No keys yet. Create one with <code>headgate key create NAME</code>.`} /></section>`;
}

export function KeysView({ admin }) {
  if (!admin) return html`<${Empty}>${READ_ONLY} Keys and usage are left out.<//>`;
  return html`<${Keys} /><${Usage} />`;
}
