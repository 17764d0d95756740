/** The conversation of the playground. It goes on while another view is shown. */

import { request } from "./api.js";
import { addBody, emptyAnswer, streamReader } from "./chat_stream.js";

const PATH = "v1/chat/completions";

/** The messages of the API for the turns of the page. */
function messagesOf(system, turns) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "assistant") {
      const calls = turn.tool_calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
      messages.push({ role: "assistant", content: turn.content || null, ...(calls.length ? { tool_calls: calls } : {}) });
    } else if (turn.role === "tool") {
      messages.push({ role: "tool", tool_call_id: turn.tool_call_id, content: turn.content });
    } else {
      messages.push({ role: "user", content: turn.content });
    }
  }
  return messages;
}

/**
 * @typedef {Object} Settings
 * @property {string} model
 * @property {string} system
 * @property {string} tools  JSON text of an array, or empty
 * @property {string} temperature
 * @property {string} max_tokens
 * @property {boolean} stream
 */

/** @param {Settings} settings @returns {Object} fields of the body @throws {Error} with what to change */
export function fieldsOf(settings) {
  const fields = { model: settings.model, stream: settings.stream };
  if (settings.stream) fields.stream_options = { include_usage: true };
  if (settings.temperature !== "") fields.temperature = Number(settings.temperature);
  if (settings.max_tokens !== "") fields.max_tokens = Number(settings.max_tokens);
  if (settings.tools.trim()) {
    let tools;
    try {
      tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new Error(`The tools are not JSON: ${error.message}.`);
    }
    if (!Array.isArray(tools)) throw new Error('The tools must be a JSON array: [{"type": "function", "function": {...}}].');
    fields.tools = tools;
  }
  return fields;
}

function headersOf(headers) {
  return [...headers].filter(([name]) => name.startsWith("x-headgate-") || name === "x-request-id").sort();
}

export function createPlayground() {
  const listeners = new Set();
  let control = null;
  let scheduled = false;
  let state = fresh();

  function fresh() {
    return { turns: [], running: false, headers: [], error: null, seconds: null, first: null };
  }

  function publish(change) {
    state = { ...state, ...change };
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      for (const listener of listeners) listener(state);
    });
  }

  async function read(response, answer, onPart) {
    if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
      addBody(answer, await response.json());
      return;
    }
    const take = streamReader(answer);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      take(value);
      onPart();
    }
  }

  /** Sends the conversation with new turns (of the user, or results of tools) and reads the answer. */
  async function send(settings, added) {
    let fields;
    try {
      fields = fieldsOf(settings);
    } catch (error) {
      publish({ error: error.message });
      return;
    }
    const turns = [...state.turns, ...added];
    const own = new AbortController();
    control = own;
    const begun = performance.now();
    const answer = emptyAnswer();
    const seconds = () => (performance.now() - begun) / 1000;
    let first = null;
    const turn = (done) => ({ role: "assistant", ...answer, done });
    publish({ turns, running: true, error: null, headers: [], seconds: null, first: null });
    try {
      const body = { ...fields, messages: messagesOf(settings.system, turns) };
      const response = await request("POST", PATH, body, own.signal);
      publish({ headers: headersOf(response.headers) });
      await read(response, answer, () => {
        if (first === null && (answer.content || answer.reasoning || answer.tool_calls.length)) first = seconds();
        publish({ turns: [...turns, turn(false)], first });
      });
      publish({ turns: [...turns, turn(true)], error: answer.error });
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (stopped) answer.finish_reason = "stopped";
      const got = answer.content || answer.tool_calls.length;
      const headers = error.headers ? headersOf(error.headers) : state.headers;
      publish({ turns: got ? [...turns, turn(true)] : turns, error: stopped ? null : error.message, headers });
    } finally {
      if (control === own) control = null;
      publish({ running: false, seconds: seconds() });
    }
  }

  function stop() {
    if (control) control.abort();
  }

  return {
    get state() {
      return state;
    },
    send,
    stop,
    clear() {
      stop();
      publish(fresh());
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}
