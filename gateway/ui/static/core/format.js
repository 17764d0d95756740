/** Numbers, bytes and times as text. Pure functions; a missing value is an en dash. */

export const NONE = "–";
const GIB = 2 ** 30;
const MIB = 2 ** 20;

/** @param {?number} value @returns {boolean} */
export const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** Two decimals below 10, one below 100, none above: 0.12, 4.56, 78.9, 1234. */
function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2);
}

/** @param {?number} value @returns {string} rounded, with thousands separators */
export function count(value) {
  return missing(value) ? NONE : String(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

/** @param {?number} value  bytes @returns {string} MiB below 1 GiB, else GiB */
export function bytes(value) {
  if (missing(value)) return NONE;
  if (Math.abs(value) >= GIB) return `${digits(value / GIB)} GiB`;
  const mib = value / MIB;
  return `${mib === 0 || Math.abs(mib) >= 10 ? Math.round(mib) : mib.toFixed(1)} MiB`;
}

/** @param {?number} value  0 to 1 @returns {string} */
export function percent(value) {
  if (missing(value)) return NONE;
  const hundredths = value * 100;
  return `${hundredths > 0 && hundredths < 10 ? hundredths.toFixed(1) : Math.round(hundredths)} %`;
}

/** @param {?number} value  per second @returns {string} */
export const rate = (value) => (missing(value) ? NONE : digits(value));

/** @param {?number} value  seconds @returns {string} 12 ms, 1.25 s, 2 min 5 s, 3 h 10 min, 2 d 4 h */
export function duration(value) {
  if (missing(value)) return NONE;
  const seconds = Math.max(0, value);
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${digits(seconds)} s`;
  return clock(seconds);
}

/** @param {number} value  seconds @returns {string} whole seconds: 12 s, 2 min 5 s, 3 h 10 min, 2 d 4 h */
export function clock(value) {
  const seconds = Math.max(0, Math.round(value));
  const [minutes, hours, days] = [60, 3600, 86400].map((size) => Math.floor(seconds / size));
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}

/** @param {number} at @param {number} now @returns {string} */
export function ago(at, now) {
  const seconds = now - at;
  return seconds < 1 ? "now" : `${clock(seconds)} ago`;
}

/** @param {number} at @param {number} now @returns {string} */
export function until(at, now) {
  return at - now <= 0 ? "due" : `in ${clock(at - now)}`;
}

/** @param {number} at  Unix seconds @returns {string} local date and time, with milliseconds */
export function absolute(at) {
  const time = new Date(at * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  const hour = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  return `${day} ${hour}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}

/** @param {number} at  Unix seconds @returns {string} local time of day */
export const timeOfDay = (at) => absolute(at).slice(11, 19);

/** @param {number} value @param {string} one @param {string} [many] @returns {string} "1 model", "2 models" */
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
