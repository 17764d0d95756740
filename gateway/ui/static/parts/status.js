/** A state as a shape, a word and a color: never the color alone. */

import { TONES } from "../core/words.js";
import { html } from "../vendor/preact-htm.js";

const SHAPES = { ok: "●", busy: "◐", off: "○", warn: "▲", bad: "✕" };

/**
 * @param {Object} props
 * @param {string} props.value  a state, as the gateway calls it
 * @param {string} [props.label]  shown instead of the value
 * @param {import("../core/words.js").Tone} [props.tone]
 */
export function Status({ value, label, tone }) {
  const kind = tone || TONES[value] || "off";
  return html`<span class=${`status ${kind}`}><span class="shape" aria-hidden="true">${SHAPES[kind]}</span><span>${label || value}</span></span>`;
}

/** A message across the page or a part of it. `role="status"` only where its appearance must be announced. */
export function Notice({ tone = "warn", children, live = false }) {
  return html`<p class=${`notice ${tone}`} role=${live ? "status" : undefined}>
    <span class="shape" aria-hidden="true">${SHAPES[tone]}</span><span>${children}</span>
  </p>`;
}

/** What a view shows without data, and what to do about it. */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
