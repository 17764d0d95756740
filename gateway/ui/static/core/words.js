/** Labels and short explanations of values that the gateway sends. A value without an entry is shown as it is. */

/** @typedef {"ok"|"busy"|"off"|"warn"|"bad"} Tone */

/** @type {Object<string, Tone>} states of models, devices and breakers */
export const TONES = {
  cold: "off", loading: "busy", ready: "ok", busy: "ok", draining: "warn", offloading: "busy", warm: "off",
  restoring: "busy", unloading: "busy", failed: "bad",
  healthy: "ok", suspect: "warn", quarantined: "bad", probing: "warn", lost: "bad",
  closed: "ok", "half-open": "warn", open: "bad",
  low: "ok", moderate: "ok", high: "warn", critical: "bad", emergency: "bad",
  info: "off", warning: "warn", error: "bad",
};

export const TIERS = {
  local: "the first choice, a local model",
  "local-fallback": "another local model",
  cloud: "a cloud provider",
  none: "no tier answered",
};

export const REASONS = {
  policy: "clouds are forbidden by the route or the request",
  provider_absent: "the provider has no key",
  capability: "the candidate lacks tools, images, audio or a field",
  other_vectors: "vectors of different models cannot be compared",
  other_vocabulary: "the request holds token ids of another model",
  context_too_small: "the prompt leaves no room for an answer",
  breaker_open: "the breaker was open",
  held: "the queue was full, and the stated wait was not over",
  no_smaller: "no smaller local model was ready or fitted",
  no_node: "no inference service could take the request",
  cannot_fit: "the model could not be loaded",
  budget_spent: "the time or the attempts of the request were spent",
  little_room: "a later model has more room for the answer",
  predicted_too_slow: "load, queue and prefill would have taken too long",
  unhealthy: "the request would likely have failed there",
  recovering: "the provider was recovering",
  silent: "requests waited there without progress",
};

export const PHASES = {
  admission: "waiting for admission",
  queued: "queued",
  loading: "loading",
  prefill: "prefill",
  decoding: "decoding",
  done: "done",
};

export const ACTIONS = {
  load: { label: "Load", does: "Loads the model onto a device." },
  unload: { label: "Unload", does: "Ends its worker and frees its memory." },
  offload: { label: "Offload", does: "Moves it to the warm pool in host memory." },
  move: { label: "Move", does: "Loads it on another device." },
  restart: { label: "Restart", does: "Ends its worker and loads it again." },
};

export const READ_ONLY = "This key has no scope “admin”, so this page is read-only.";

/** @param {import("./types.js").RequestRow} request @param {function(number): string} count  formats a number @returns {string} "prefill 512 of 2,048" */
export function phaseText(request, count) {
  const { phase, done, total } = request;
  const word = PHASES[phase] || phase;
  if (phase === "queued" && done) return `queued, place ${count(done)}`;
  if (phase === "loading" && done !== null && done !== undefined) return `loading ${count(done)} %`;
  if (phase === "prefill" && total) return `prefill ${count(done)} of ${count(total)}`;
  return word;
}
