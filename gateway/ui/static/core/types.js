/**
 * Types of the records in the event stream. Sizes are in bytes, durations in seconds, times in Unix seconds.
 *
 * @typedef {Object} Model
 * @property {string} id
 * @property {string} [node]  where there are several inference services
 * @property {Object} headgate  the status, as in `/v1/models`
 * @property {Figures} [figures]
 * @property {Object<string, Object<string, number>>} [blocks]  by device: weights, kv, compute, other
 * @property {?number} [progress]  0 to 1 while it loads
 * @property {?number} [idle_until]  set by the reducer: when the model leaves if it stays idle
 *
 * @typedef {Object} Figures
 * @property {?number} tokens_per_second
 * @property {?number} ttft_p50
 * @property {?number} ttft_p99
 * @property {?number} prefix_hit_ratio
 * @property {?{hot: number, ram: number, disk: number}} kv
 * @property {?number} idle_deadline_seconds
 *
 * @typedef {Object} Device
 * @property {string} id
 * @property {string} [node]  where there are several inference services
 * @property {string} name
 * @property {string} kind
 * @property {string} state
 * @property {number} total_bytes
 * @property {number} usable_bytes
 * @property {?number} limit_bytes
 * @property {number} used_bytes
 * @property {number} free_bytes
 * @property {Object<string, number>} accounts
 * @property {Object<string, Object<string, number>>} by_model
 * @property {Object<string, number>} [warm]
 * @property {string} pressure
 * @property {number} pressure_ratio
 * @property {Object<string, number>} [pressure_levels]
 * @property {?string} reason
 *
 * @typedef {Object} Node  one of several inference services
 * @property {string} name
 * @property {string} url
 * @property {?boolean} reachable
 * @property {number} since  when `reachable` changed
 *
 * @typedef {Object} Breaker
 * @property {string} name
 * @property {string} state
 * @property {?number} opens_until
 * @property {?string} last_failure
 *
 * @typedef {Object} RequestRow
 * @property {string} id
 * @property {number} started
 * @property {string} phase
 * @property {?number} done
 * @property {?number} total
 * @property {?string} outcome
 *
 * @typedef {Object} Minute
 * @property {number} start
 * @property {Object<string, number>} by_tier
 * @property {Object<string, number>} errors
 * @property {Object<string, number>} fallbacks
 * @property {?number} ttft_p50
 * @property {number} tokens
 *
 * @typedef {Object} Entry
 * @property {number} at
 * @property {string} kind
 * @property {string} subject
 * @property {string} text
 * @property {string} severity
 *
 * @typedef {Object} Session
 * @property {string} name
 * @property {string[]} scopes
 * @property {string} csrf
 * @property {string} version
 *
 * @typedef {Object} StreamEvent
 * @property {string} kind
 * @property {any} data
 * @property {number} at  arrival by the browser's clock, Unix seconds
 */
export {};
