/**
 * The state of the page as a pure function of the events of the stream.
 *
 * `reduce(state, events)` returns a new state. Containers that no event touched keep their identity, so views can
 * compare them by reference. Arrays and maps that grow with time have a limit.
 */

export const LIMITS = { timeline: 500, requests: 200, live: 2000, log: 200, minutes: 60 };

/** The key of a model, which several nodes may have. @param {{id: string, node?: string}} model */
export const modelKey = ({ id, node }) => (node ? `${node} ${id}` : id);

/** @returns {Object} the state before the first snapshot */
export function initial() {
  return {
    connected: false,
    down_since: null, // when the stream broke; null while it is open or being opened for the first time
    loaded: false, // whether there was a snapshot
    offset: 0, // the server's clock less the browser's, in seconds
    serial: 0, // keys of timeline entries and log lines
    gateway: {},
    inference: { reachable: null, since: null, nodes: [] }, // `nodes`: only where there are several services
    models: new Map(),
    devices: [],
    breakers: new Map(),
    live: new Map(), // running requests, oldest first
    finished: new Map(), // finished requests, oldest first
    minutes: new Map(),
    timeline: [],
    log: [],
  };
}

/** A working copy whose containers are copied once, when they are changed. */
class Draft {
  constructor(state) {
    this.next = { ...state };
    this.owned = new Set();
  }

  own(name) {
    if (!this.owned.has(name)) {
      const value = this.next[name];
      this.next[name] = value instanceof Map ? new Map(value) : value.slice();
      this.owned.add(name);
    }
    return this.next[name];
  }

  /** The limits, applied once for all events. */
  finish() {
    for (const name of this.owned) {
      const value = this.next[name];
      const limit = LIMITS[name === "finished" ? "requests" : name];
      if (limit === undefined) continue;
      if (Array.isArray(value)) {
        if (value.length > limit) this.next[name] = value.slice(-limit);
      } else {
        for (const key of value.keys()) {
          if (value.size <= limit) break;
          value.delete(key);
        }
      }
    }
    return this.next;
  }
}

/** The moment of the idle deadline replaces the seconds until then, which are right only when they arrive. */
function dated(model, now) {
  const seconds = model.figures ? model.figures.idle_deadline_seconds : null;
  return { ...model, idle_until: seconds === null || seconds === undefined ? null : now + seconds };
}

function putRequest(draft, request) {
  if (request.phase === "done") {
    draft.own("live").delete(request.id);
    const finished = draft.own("finished");
    finished.delete(request.id); // a repeated id moves to the end
    finished.set(request.id, request);
  } else {
    draft.own("live").set(request.id, request);
  }
}

function putMinute(draft, minute) {
  draft.own("minutes").set(minute.start, minute);
}

function append(draft, name, record) {
  draft.next.serial += 1;
  draft.own(name).push({ ...record, key: draft.next.serial });
}

/** @type {Object<string, function(Draft, any, number): void>} */
const HANDLERS = {
  snapshot(draft, data, at) {
    const fresh = initial();
    const kept = { serial: draft.next.serial, minutes: draft.next.minutes };
    draft.owned.clear();
    Object.assign(draft.next, fresh, kept, { connected: true, loaded: true });
    const gateway = data.gateway || {};
    const offset = gateway.now ? gateway.now - at : 0;
    Object.assign(draft.next, { gateway, offset, devices: data.devices || [] });
    draft.next.inference = { ...fresh.inference, ...data.inference };
    draft.next.started = at + offset - (gateway.uptime_seconds || 0);
    for (const model of data.models || []) draft.own("models").set(modelKey(model), dated(model, at + offset));
    for (const breaker of data.breakers || []) draft.own("breakers").set(breaker.name, breaker);
    for (const request of data.requests || []) putRequest(draft, request);
    for (const minute of data.minutes || []) putMinute(draft, minute);
    for (const entry of data.timeline || []) append(draft, "timeline", entry);
    for (const line of data.log || []) append(draft, "log", line);
  },
  gateway(draft, data) {
    draft.next.gateway = data.gateway;
  },
  inference(draft, data) {
    draft.next.inference = { reachable: data.reachable, since: data.since, nodes: data.nodes || [] };
  },
  model(draft, data, at) {
    draft.own("models").set(modelKey(data.model), dated(data.model, at + draft.next.offset));
  },
  removed(draft, data) {
    draft.own("models").delete(modelKey(data));
  },
  devices(draft, data) {
    const others = draft.next.devices.filter((device) => device.node !== data.node); // `node` is absent with one service
    draft.next.devices = data.node ? [...others, ...data.devices] : data.devices;
  },
  breaker(draft, data) {
    const { name, state } = data.breaker;
    if (state === null) draft.own("breakers").delete(name);
    else draft.own("breakers").set(name, data.breaker);
  },
  request(draft, data) {
    putRequest(draft, data.request);
  },
  minute(draft, data) {
    putMinute(draft, data.minute);
  },
  timeline(draft, data) {
    append(draft, "timeline", data.entry);
  },
  log(draft, data) {
    append(draft, "log", data.line);
  },
  /** The stream broke, or could not be opened. */
  down(draft, _data, at) {
    draft.next.connected = false;
    if (draft.next.down_since === null) draft.next.down_since = at + draft.next.offset;
  },
  /** Signed out: nothing of the session stays. */
  reset(draft) {
    draft.owned.clear();
    Object.assign(draft.next, initial());
  },
};

/** Names of the events of the stream. */
export const KINDS = [
  "snapshot", "gateway", "inference", "model", "removed", "devices", "breaker", "request", "minute", "timeline", "log",
];

/**
 * @param {Object} state
 * @param {import("./types.js").StreamEvent[]} events  in order
 * @returns {Object}
 */
export function reduce(state, events) {
  const draft = new Draft(state);
  for (const { kind, data, at } of events) {
    const handler = HANDLERS[kind];
    if (handler) handler(draft, data, at);
  }
  return draft.finish();
}

/**
 * Sums of the last minutes. `ttft_p50` is the mean of their medians, weighted by requests; null without any.
 * @param {Map<number, import("./types.js").Minute>} minutes
 * @param {number} now  Unix seconds by the server's clock
 * @param {number} [span]  minutes, the running one included
 */
export function recent(minutes, now, span = 5) {
  const first = Math.floor(now / 60) * 60 - (span - 1) * 60;
  const sums = { total: 0, tokens: 0, by_tier: {}, errors: {}, fallbacks: {}, ttft_p50: null };
  let weight = 0;
  for (const minute of minutes.values()) {
    if (minute.start < first) continue;
    const before = sums.total;
    for (const name of ["by_tier", "errors", "fallbacks"]) {
      for (const [key, n] of Object.entries(minute[name] || {})) {
        sums[name][key] = (sums[name][key] || 0) + n;
        if (name === "by_tier") sums.total += n;
      }
    }
    sums.tokens += minute.tokens || 0;
    const answered = sums.total - before;
    if (minute.ttft_p50 !== null && minute.ttft_p50 !== undefined && answered) {
      weight += answered;
      sums.ttft_p50 = (sums.ttft_p50 || 0) + minute.ttft_p50 * answered;
    }
  }
  if (weight) sums.ttft_p50 /= weight;
  return sums;
}
