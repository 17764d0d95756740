/** Times relative to now, with the absolute time as title. `clock.js` updates their text without a render. */

import { forget, keep, now } from "../core/clock.js";
import { absolute, ago, clock, timeOfDay, until } from "../core/format.js";
import { html, useLayoutEffect, useRef } from "../vendor/preact-htm.js";

function Living({ at, text }) {
  const ref = useRef(null);
  useLayoutEffect(() => {
    const element = ref.current;
    keep(element, (time) => text(at, time));
    return () => forget(element);
  }, [at, text]);
  return html`<time ref=${ref} dateTime=${new Date(at * 1000).toISOString()} title=${absolute(at)} />`;
}

/** @param {{at: number}} props  "12 s ago" */
export const Ago = ({ at }) => html`<${Living} at=${at} text=${ago} />`;

/** @param {{at: number}} props  "in 12 s" */
export const Until = ({ at }) => html`<${Living} at=${at} text=${until} />`;

const since = (at, time) => clock(time - at);

/** @param {{at: number}} props  "12 s" */
export const Elapsed = ({ at }) => html`<${Living} at=${at} text=${since} />`;

/**
 * "12:01:05 (12 s)". Screen readers would read a time that changes every second again and again, so they get only the
 * time of day.
 * @param {{at: number}} props
 */
export const Since = ({ at }) => html`${timeOfDay(at)}<span aria-hidden="true"> (<${Elapsed} at=${at} />)</span>`;

export { now };
