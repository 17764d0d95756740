import * as api from "../core/api.js";
import { Notice } from "../parts/status.js";
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";

/** @param {{onSignIn: function(import("../core/types.js").Session): void, notice: ?string}} props */
export function SignIn({ onSignIn, notice }) {
  const [state, setState] = useState({ running: false, error: null });
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);

  async function submit(event) {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!key) {
      setState({ running: false, error: "Enter a key." });
      field.current.focus();
      return;
    }
    setState({ running: true, error: null });
    try {
      onSignIn(await api.session.open(key));
    } catch (error) {
      setState({ running: false, error: error.message });
      field.current.select();
    }
  }

  return html`<main id="main" class="sign-in"><h1>Headgate</h1>
    ${notice && html`<${Notice} tone="warn" live=${true}>${notice}<//>`}
    <form onSubmit=${submit} novalidate>
      <label for="key">API key</label>
      <input id="key" ref=${field} type="password" autocomplete="current-password" spellcheck="false" required
        aria-describedby="key-hint" aria-invalid=${state.error ? "true" : undefined} />
      <p id="key-hint" class="dim"><code>headgate key show</code> prints the first key. With the scope “admin” you can load and
        unload models; with “use” you can view them and use the playground.</p>
      <div aria-live="assertive">${state.error && html`<${Notice} tone="bad">${state.error}<//>`}</div>
      <button type="submit" class="main" disabled=${state.running}>${state.running ? "Signing in …" : "Sign in"}</button>
    </form></main>`;
}
