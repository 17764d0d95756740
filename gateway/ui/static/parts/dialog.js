import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Notice } from "./status.js";

/**
 * A modal dialog. The browser keeps the focus inside, closes it by Escape, and returns the focus.
 * @param {{title: string, onClose: function(): void, children: any, wide?: boolean}} props
 */
export function Dialog({ title, onClose, children, wide }) {
  const ref = useRef(null);
  useEffect(() => {
    const element = ref.current;
    const opener = document.activeElement;
    element.showModal();
    return () => {
      if (element.open) element.close();
      if (opener && opener.isConnected) opener.focus();
    };
  }, []);
  return html`<dialog ref=${ref} class=${wide ? "wide" : undefined} aria-labelledby="dialog-title" onClose=${onClose}>
    <header>
      <h2 id="dialog-title">${title}</h2>
      <button type="button" class="quiet" onClick=${() => ref.current.close()}>Close</button>
    </header>
    ${children}
  </dialog>`;
}

/**
 * A dialog that states what would happen, and does it after a confirmation.
 * @param {{title: string, sentences: string[], verb: string, run: function(): Promise<any>, onClose: function(): void}} props
 */
export function Confirm({ title, sentences, verb, run, onClose }) {
  const [state, setState] = useState({ running: false, error: null, done: false });
  async function confirm() {
    setState({ running: true, error: null, done: false });
    try {
      await run();
      setState({ running: false, error: null, done: true });
    } catch (error) {
      setState({ running: false, error: error.message, done: false });
    }
  }
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <ul class="sentences">${sentences.map((sentence) => html`<li>${sentence}</li>`)}</ul>
    <div aria-live="polite">
      ${state.error && html`<${Notice} tone="bad">${state.error}<//>`}
      ${state.done && html`<${Notice} tone="ok">Done.<//>`}
    </div>
    ${!state.done && html`<p class="buttons">
      <button type="button" class="main" disabled=${state.running} onClick=${confirm}>${state.running ? "Working …" : verb}</button>
    </p>`}
  <//>`;
}
