/** One conversation with a route, with tools, and the headers that say where the answer came from. */

import * as api from "../core/api.js";
import { duration, plural, rate } from "../core/format.js";
import { address } from "../core/router.js";
import { Empty, Notice } from "../parts/status.js";
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";

const TOOLS = `[
  {"type": "function", "function": {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
  }}
]`;
/** The settings, kept while another view is shown. */
const remembered = { model: "", system: "", tools: "", temperature: "", max_tokens: "", stream: true };

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

function Turn({ turn }) {
  return html`<li class=${`turn ${turn.role}`}>
    <h3>${NAMES[turn.role]}${turn.finish_reason && turn.finish_reason !== "stop" ? html` <span class="dim">${turn.finish_reason}</span>` : null}</h3>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><div class="text dim">${turn.reasoning}</div></details>`}
    ${turn.content && html`<div class="text">${turn.content}</div>`}
    ${turn.role === "assistant" && !turn.done && !turn.content && html`<p class="dim">${turn.progress || "Waiting …"}</p>`}
    ${(turn.tool_calls || []).map((call) => html`<pre class="call" tabindex="0" aria-label=${`call of ${call.name}`}>${call.name}(${call.arguments})</pre>`)}
  </li>`;
}

const pendingCalls = (turns) => {
  const last = turns[turns.length - 1];
  return last && last.role === "assistant" && last.done ? last.tool_calls : [];
};

/** The fields for the results of tools that the model called. */
function ToolResults({ calls, onSend }) {
  const form = useRef(null);
  function submit(event) {
    event.preventDefault();
    const data = new FormData(form.current);
    onSend(calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: String(data.get(`result-${index}`)) })));
  }
  return html`<form ref=${form} onSubmit=${submit} class="composer">
    ${calls.map((call, index) => html`<label key=${call.id}>Result of ${call.name}
      <textarea name=${`result-${index}`} rows="2" required></textarea></label>`)}
    <button type="submit" class="main">Send results</button></form>`;
}

function Composer({ running, disabled, onSend, onStop }) {
  const field = useRef(null);
  function send() {
    const text = field.current.value.trim();
    if (!text || running || disabled) return;
    field.current.value = "";
    onSend([{ role: "user", content: text }]);
  }
  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  }
  return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <label for="message">Message</label>
    <textarea id="message" ref=${field} rows="3" placeholder="Enter sends, Shift and Enter begins a line" onKeyDown=${onKey}></textarea>
    <p class="buttons">${running
      ? html`<button type="button" class="main" onClick=${onStop}>Stop</button>`
      : html`<button type="submit" class="main" disabled=${disabled}>Send</button>`}</p></form>`;
}

function Figures({ chat }) {
  const last = chat.turns[chat.turns.length - 1];
  const usage = last && last.usage;
  const parts = [
    chat.first !== null && `first token after ${duration(chat.first)}`,
    chat.seconds !== null && `${duration(chat.seconds)} in all`,
    usage && `${plural(usage.prompt_tokens, "prompt token")}, ${plural(usage.completion_tokens, "token")}`,
    usage && chat.seconds > (chat.first || 0) && `${rate(usage.completion_tokens / (chat.seconds - (chat.first || 0)))} tokens/s`,
  ].filter(Boolean);
  return parts.length ? html`<p class="dim">${parts.join(" · ")}</p>` : null;
}

function Headers({ headers }) {
  if (!headers.length) return html`<${Empty}>The headers of the last answer appear here.<//>`;
  return html`<dl class="facts mono">${headers.map(([name, value]) => html`<div key=${name}><dt>${name}</dt>
    <dd>${name === "x-request-id" ? html`<a href=${address("requests", value)}>${value}</a>` : value}</dd></div>`)}</dl>`;
}

function Settings({ settings, names, onChange }) {
  const field = (name) => ({ id: `play-${name}`, value: settings[name], onInput: (event) => onChange({ [name]: event.target.value }) });
  return html`<div class="settings">
    <label for="play-model">Model</label>
    <select ...${field("model")}>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
    <label for="play-system">System prompt</label><textarea rows="2" ...${field("system")}></textarea>
    <div class="two"><div><label for="play-temperature">Temperature</label><input type="number" min="0" max="2" step="0.1" placeholder="default" ...${field("temperature")} /></div>
      <div><label for="play-max_tokens">Max tokens</label><input type="number" min="1" step="1" placeholder="default" ...${field("max_tokens")} /></div></div>
    <label for="play-tools">Tools (JSON array)</label>
    <textarea rows="6" class="mono" spellcheck="false" placeholder="none" ...${field("tools")}></textarea>
    <p class="buttons"><button type="button" onClick=${() => onChange({ tools: TOOLS })}>Insert an example</button>
      <label class="check"><input type="checkbox" checked=${settings.stream} onChange=${(event) => onChange({ stream: event.target.checked })} /> Stream</label></p></div>`;
}

/** Names of routes, from the gateway; until then of the models in the stream. */
function useNames(models) {
  const [names, setNames] = useState(null);
  useEffect(() => {
    let wanted = true;
    api.routes().then((answer) => wanted && setNames(answer.data.map(({ id }) => id)), () => undefined);
    return () => { wanted = false; };
  }, []);
  return names || [...new Set([...models.values()].map(({ id }) => id))];
}

export function PlaygroundView({ state, playground }) {
  const [chat, setChat] = useState(playground.state);
  const [settings, setSettings] = useState(remembered);
  const names = useNames(state.models);
  useEffect(() => playground.subscribe(setChat), []);
  const chosen = names.includes(settings.model) ? settings.model : names[0] || "";
  const change = (part) => setSettings((old) => Object.assign(remembered, { ...old, ...part }) && { ...remembered });
  const send = (turns) => playground.send({ ...settings, model: chosen }, turns);
  const calls = chat.running ? [] : pendingCalls(chat.turns);
  return html`<div class="playground">
    <section aria-labelledby="conversation"><h2 id="conversation">Conversation</h2>
      ${chat.turns.length
        ? html`<ol class="turns" aria-label="Messages">${chat.turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} />`)}</ol>`
        : html`<${Empty}>${names.length ? "Write a message below, for example: What is Headgate?" : html`No models yet. Add one with <code>headgate add FILE.gguf</code>.`}<//>`}
      <p role="status" class="dim">${chat.running ? "Answering …" : chat.seconds !== null && !chat.error ? "The answer is complete." : ""}</p>
      ${chat.error && html`<${Notice} tone="bad" live=${true}>${chat.error}<//>`}
      <${Figures} chat=${chat} />
      ${calls.length ? html`<${ToolResults} calls=${calls} onSend=${send} />` : null}
      <${Composer} running=${chat.running} disabled=${!names.length} onSend=${send} onStop=${playground.stop} />
      ${chat.turns.length > 0 && html`<button type="button" onClick=${playground.clear}>New conversation</button>`}
    </section>
    <aside aria-label="Settings and headers">
      <section aria-labelledby="settings"><h2 id="settings">Settings</h2>
        <${Settings} settings=${{ ...settings, model: chosen }} names=${names} onChange=${change} /></section>
      <section aria-labelledby="headers"><h2 id="headers">Response headers</h2><${Headers} headers=${chat.headers} /></section>
    </aside></div>`;
}
