/** The event stream: opened, watched, and opened again when it breaks. */

import { KINDS } from "./reducer.js";

const SILENT_MS = 15_000; // a beat comes every 5 s
const CHECK_MS = 2_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8_000;

/**
 * @param {Object} options
 * @param {string} options.url
 * @param {function(import("./types.js").StreamEvent): void} options.onEvent  also with `down` when the stream broke
 * @param {function(): Promise<boolean>} options.isSignedIn  called after a failure; false ends the feed
 * @param {function(): void} options.onSignedOut
 * @returns {{close: function(): void}}
 */
export function openFeed({ url, onEvent, isSignedIn, onSignedOut }) {
  let source = null;
  let retry = null;
  let delay = FIRST_RETRY_MS;
  let seen = 0;
  let closed = false;
  const now = () => Date.now() / 1000;

  function open() {
    clearTimeout(retry);
    retry = null;
    if (closed) return;
    seen = Date.now();
    const opened = new EventSource(url);
    source = opened;
    for (const kind of KINDS) {
      opened.addEventListener(kind, (event) => {
        seen = Date.now();
        if (kind === "snapshot") delay = FIRST_RETRY_MS;
        onEvent({ kind, data: JSON.parse(event.data), at: now() });
      });
    }
    opened.addEventListener("beat", () => {
      seen = Date.now();
    });
    opened.onerror = () => lose(opened);
  }

  /** EventSource would reconnect by itself, but neither after an error status nor with a growing delay. */
  async function lose(lost) {
    if (closed || lost !== source) return;
    lost.close();
    source = null;
    onEvent({ kind: "down", data: null, at: now() });
    retry = setTimeout(open, delay * (0.8 + 0.4 * Math.random()));
    delay = Math.min(LAST_RETRY_MS, delay * 2);
    if (!(await isSignedIn()) && !closed) {
      close();
      onSignedOut();
    }
  }

  function check() {
    if (source && Date.now() - seen > SILENT_MS) lose(source);
  }

  /** Opens the stream at once when the page becomes visible, or when the network returns. */
  function hurry() {
    if (document.visibilityState === "visible" && retry !== null) open();
  }

  function close() {
    closed = true;
    clearTimeout(retry);
    clearInterval(watch);
    document.removeEventListener("visibilitychange", hurry);
    window.removeEventListener("online", hurry);
    if (source) source.close();
    source = null;
  }

  const watch = setInterval(check, CHECK_MS);
  document.addEventListener("visibilitychange", hurry);
  window.addEventListener("online", hurry);
  open();
  return { close };
}
