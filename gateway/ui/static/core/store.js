/** One state, changed by events, with at most one notification per animation frame. */

const AT_ONCE = 1000; // a hidden page gets no animation frames; this many waiting events are applied without one

/**
 * @param {function(Object, Object[]): Object} reduce
 * @param {Object} state
 * @param {function(function(): void): void} [frame]
 */
export function createStore(reduce, state, frame = (run) => requestAnimationFrame(run)) {
  let waiting = [];
  let scheduled = false;
  const listeners = new Set();

  function apply() {
    if (!waiting.length) return;
    const events = waiting;
    waiting = [];
    store.state = reduce(store.state, events);
  }

  function flush() {
    scheduled = false;
    apply();
    for (const listener of listeners) listener(store.state);
  }

  const store = {
    state,
    /** @param {import("./types.js").StreamEvent} event */
    dispatch(event) {
      waiting.push(event);
      if (waiting.length >= AT_ONCE) apply();
      if (!scheduled) {
        scheduled = true;
        frame(flush);
      }
    },
    /** @param {function(Object): void} listener @returns {function(): void} ends the subscription */
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
  return store;
}
