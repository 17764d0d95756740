/** Which tier answered, with errors and fallbacks (last five minutes), and requests per minute (last hour). */

import { now } from "../core/clock.js";
import { count, duration, percent, plural } from "../core/format.js";
import { recent } from "../core/reducer.js";
import { REASONS, TIERS } from "../core/words.js";
import { Chart } from "../parts/chart.js";
import { Empty } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { html, useEffect, useMemo, useState } from "../vendor/preact-htm.js";

const HISTORY_MINUTES = 60;

const Figure = ({ label, value, sub }) => html`<div class="figure"><dt>${label}</dt><dd>${value}${sub && html`<span class="sub">${sub}</span>`}</dd></div>`;

const share = (part, all) => (all ? part / all : 0);

const TIER_COLUMNS = [
  { key: "tier", label: "Tier", cell: (row) => html`<span class=${`key tier-${row.tier}`} aria-hidden="true"></span>${row.tier}` },
  { key: "meaning", label: "Answered by", style: "wide", cell: (row) => TIERS[row.tier] || "" },
  { key: "requests", label: "Requests", numeric: true, cell: (row) => count(row.n) },
  { key: "share", label: "Share", numeric: true, cell: (row) => percent(row.share) },
  {
    key: "bar", label: "", style: "meter-cell",
    cell: (row) => html`<span class="meter" aria-hidden="true"><span class=${`tier-${row.tier}`} style=${{ width: `${100 * row.share}%` }}></span></span>`,
  },
];

const reasons = (label, meanings) => [
  { key: "reason", label, style: "id", cell: (row) => row.name },
  { key: "requests", label: "Requests", numeric: true, cell: (row) => count(row.n) },
  { key: "meaning", label: "Meaning", style: "wide", cell: (row) => meanings[row.name] || "" },
];
const ERROR_COLUMNS = reasons("Error", {}).slice(0, 2);
const FALLBACK_COLUMNS = reasons("Reason", REASONS);

const sorted = (counts) => Object.entries(counts).map(([name, n]) => ({ name, n })).sort((a, b) => b.n - a.n || (a.name < b.name ? -1 : 1));

/** One column per minute, the ones without a request included. */
function history(minutes, time) {
  const last = Math.floor(time / 60) * 60;
  const times = Array.from({ length: HISTORY_MINUTES }, (_, index) => last - (HISTORY_MINUTES - 1 - index) * 60);
  const series = Object.keys(TIERS).map((tier) => ({
    label: tier, variable: `--tier-${tier}`,
    values: times.map((start) => ((minutes.get(start) || {}).by_tier || {})[tier] || 0),
  }));
  return { times, series };
}

/** The current time. Renders every `seconds`, so that old minutes leave the sums without an event. */
function useTime(seconds) {
  const [time, setTime] = useState(now);
  useEffect(() => {
    const timer = setInterval(() => setTime(now()), seconds * 1000);
    return () => clearInterval(timer);
  }, [seconds]);
  return Math.max(time, now());
}

export function OverviewView({ state, theme }) {
  const time = useTime(5);
  const sums = recent(state.minutes, time);
  const minute = Math.floor(time / 60);
  const { times, series } = useMemo(() => history(state.minutes, time), [state.minutes, minute]);
  const errors = sorted(sums.errors);
  const fallbacks = sorted(sums.fallbacks);
  const [failed, moved] = [errors, fallbacks].map((rows) => rows.reduce((all, { n }) => all + n, 0));
  const tiers = Object.keys(TIERS).map((tier) => ({ tier, n: sums.by_tier[tier] || 0, share: share(sums.by_tier[tier] || 0, sums.total) }));
  const { nodes } = state.inference;
  const down = new Set(nodes.filter(({ reachable }) => !reachable).map(({ name }) => name));
  const loaded = [...state.models.values()].filter((model) => ["ready", "busy"].includes((model.headgate || {}).state) && !down.has(model.node)).length;
  const queued = [...state.live.values()].filter((request) => ["admission", "queued"].includes(request.phase)).length;
  return html`
    <dl class="figures">
      <${Figure} label="Requests" value=${count(sums.total)} sub="in 5 min" />
      <${Figure} label="Answered locally" value=${sums.total ? percent(share((sums.by_tier.local || 0) + (sums.by_tier["local-fallback"] || 0), sums.total)) : "–"} />
      <${Figure} label="Errors" value=${count(failed)} sub=${failed ? percent(share(failed, sums.total)) : null} />
      <${Figure} label="Fallbacks" value=${count(moved)} sub=${moved ? percent(share(moved, sums.total)) : null} />
      <${Figure} label="TTFT p50" value=${duration(sums.ttft_p50)} />
      <${Figure} label="Tokens" value=${count(sums.tokens)} sub="in 5 min" />
      <${Figure} label="Running now" value=${count(state.live.size - queued)} sub=${queued ? `${count(queued)} waiting` : null} />
      ${nodes.length > 0 && html`<${Figure} label="Nodes" value=${count(nodes.filter(({ reachable }) => reachable).length)} sub=${`of ${count(nodes.length)} answer`} />`}
      <${Figure} label="Models loaded" value=${count(loaded)} sub=${`of ${count(state.models.size)}`} />
    </dl>
    <section aria-labelledby="by-tier">
      <h2 id="by-tier">Answers by tier, last five minutes</h2>
      ${sums.total
        ? html`<${Table} caption="Answers by tier" hideCaption=${true} columns=${TIER_COLUMNS} rows=${tiers} id=${(row) => row.tier} />`
        : html`<${Empty}>No requests in the last five minutes. Send one with <code>headgate run demo "What is Headgate?"</code> or in the <a href="#/playground">playground</a>.<//>`}
    </section>
    <section aria-labelledby="per-minute">
      <h2 id="per-minute">Requests per minute, last hour</h2>
      <${Chart} label=${`Requests per minute by tier: ${plural(sums.total, "request")} in the last five minutes`} times=${times} series=${series} theme=${theme} />
    </section>
    <div class="columns">
      <section aria-labelledby="errors"><h2 id="errors">Errors, last five minutes</h2>
        <${Table} caption="Errors" hideCaption=${true} columns=${ERROR_COLUMNS} rows=${errors} id=${(row) => row.name} empty="No errors." /></section>
      <section aria-labelledby="fallbacks"><h2 id="fallbacks">Fallbacks by reason, last five minutes</h2>
        <${Table} caption="Fallbacks by reason" hideCaption=${true} columns=${FALLBACK_COLUMNS} rows=${fallbacks} id=${(row) => row.name} empty="No fallbacks: the first choice answered every request." /></section>
    </div>`;
}
