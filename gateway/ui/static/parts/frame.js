/** The frame of every view: header, navigation, and the notices about lost connections. */

import { plural } from "../core/format.js";
import { READ_ONLY } from "../core/words.js";
import { html } from "../vendor/preact-htm.js";
import { Notice, Status } from "./status.js";
import { Since } from "./time.js";

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function ThemeSwitch({ theme, onTheme }) {
  return html`<button type="button" class="quiet" onClick=${() => onTheme(NEXT[theme])}>${THEMES[theme]}</button>`;
}

function Connection({ state }) {
  if (state.connected) return html`<${Status} value="live" tone="ok" />`;
  return html`<${Status} value=${state.loaded || state.down_since ? "not connected" : "connecting"} tone=${state.down_since ? "bad" : "busy"} />`;
}

/** Counts next to the names of views: what needs attention, as a number with words for screen readers. */
function Badge({ n, words, bad }) {
  return n ? html`<span class=${`badge ${bad ? "bad" : ""}`}>${n}<span class="unseen"> ${words}</span></span>` : null;
}

function badges(state) {
  const failed = [...state.models.values()].filter((model) => (model.headgate || {}).state === "failed").length;
  const open = [...state.breakers.values()].filter((breaker) => breaker.state !== "closed").length;
  const sick = state.devices.filter((device) => device.state !== "healthy").length;
  return {
    models: html`<${Badge} n=${failed} words="failed" bad=${true} />`,
    memory: html`<${Badge} n=${sick} words="not healthy" bad=${true} />`,
    breakers: html`<${Badge} n=${open} words="not closed" bad=${true} />`,
    requests: html`<${Badge} n=${state.live.size} words="running" />`,
  };
}

export function Header({ state, session, theme, onTheme, onSignOut }) {
  const { admin } = session;
  return html`<header class="top">
    <a class="brand" href="#/overview">Headgate</a><span class="dim">${session.version}</span>
    <${Connection} state=${state} />
    <span class="grow"></span>
    <span title=${admin ? undefined : READ_ONLY}>${session.name} <span class="dim">${session.scopes.join(", ")}</span></span>
    <${ThemeSwitch} theme=${theme} onTheme=${onTheme} />
    <button type="button" class="quiet" onClick=${onSignOut}>Sign out</button>
  </header>`;
}

export function Navigation({ views, current, state }) {
  const marks = badges(state);
  return html`<nav aria-label="Views"><ul>${Object.entries(views).map(([name, { title, short }]) => html`<li key=${name}>
    <a href=${`#/${name}`} aria-current=${name === current ? "page" : undefined}>${short || title}${marks[name]}</a></li>`)}</ul></nav>`;
}

const NAMED = 3;

/** The notice that some of several nodes do not answer. */
function Missing({ nodes }) {
  const down = nodes.filter((node) => node.reachable === false);
  if (!down.length || down.length === nodes.length) return null;
  const names = down.slice(0, NAMED).map(({ name }) => name).join(", ");
  return html`<${Notice} tone="warn">${down.length === 1
    ? html`The node ${names} does not answer, since <${Since} at=${down[0].since} />. The others take its requests.`
    : `${down.length} of ${plural(nodes.length, "node")} do not answer: ${names}${down.length > NAMED ? ", …" : "."} The others take their requests.`}<//>`;
}

/** The region is always there, so that screen readers announce what appears in it. */
export function Connectivity({ state }) {
  const { connected, down_since: since, inference } = state;
  return html`<div aria-live="polite" class="notices">
    ${!connected && since !== null && html`<${Notice} tone="bad">Not connected, since <${Since} at=${since} />. ${state.loaded
      ? "The page shows the last known state and connects again by itself."
      : "The page connects by itself as soon as the gateway answers."}<//>`}
    ${connected && inference.reachable === false && html`<${Notice} tone="warn">The inference service does not answer${inference.since
      ? html`, since <${Since} at=${inference.since} />` : ""}. Clouds still answer where a route has one; local models answer again when the service does.<//>`}
    ${connected && html`<${Missing} nodes=${inference.nodes} />`}
  </div>`;
}
