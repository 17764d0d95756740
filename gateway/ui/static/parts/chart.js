/** uPlot (`uPlot`, from `vendor/uplot.js`) in the colors of the page. */

import { html, useEffect, useRef } from "../vendor/preact-htm.js";

/** A CSS variable as a color: `light-dark()` is resolved only on an element. */
function color(element, name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function stacked(series) {
  const sums = new Array(series[0].length).fill(0);
  return series.map((values) => values.map((value, index) => (sums[index] += value)));
}

const bars = uPlot.paths.bars({ size: [0.8, 24] });
const padded = (_plot, _low, high) => [0, Math.max(4, Math.ceil(high * 1.1))];

function options(element, width, series, height) {
  const [text, grid] = [color(element, "--dim"), color(element, "--line")];
  const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width, height, padding: [8, 8, 0, 0], legend: { show: false }, cursor: { show: false },
    scales: { x: { time: true, range: (_plot, low, high) => [low - 30, high + 30] }, y: { range: padded } },
    axes: [{ ...axis, grid: { show: false }, size: 28, space: 60, values: "{HH}:{mm}" }, { ...axis, size: 44, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000] }],
    // the highest sum first: the lower ones are drawn over it
    series: [{}, ...series.map(({ label, variable }) => {
      const fill = color(element, variable);
      return { label, fill, stroke: fill, width: 0, paths: bars, points: { show: false } };
    })],
  };
}

/**
 * Stacked bars over time.
 * @param {Object} props
 * @param {string} props.label  for screen readers
 * @param {number[]} props.times  Unix seconds
 * @param {{label: string, variable: string, values: number[]}[]} props.series  from the bottom to the top; a CSS variable for the color
 * @param {string} props.theme  a change draws the chart again
 * @param {number} [props.height]  pixels
 */
export function Chart({ label, times, series, theme, height = 120 }) {
  const ref = useRef(null);
  const plot = useRef(null);
  const data = [times, ...stacked(series.map(({ values }) => values)).reverse()];
  useEffect(() => {
    const element = ref.current;
    const drawn = [...series].reverse();
    plot.current = new uPlot(options(element, element.clientWidth, drawn, height), data, element);
    const sized = new ResizeObserver(() => plot.current.setSize({ width: element.clientWidth, height }));
    sized.observe(element);
    return () => {
      sized.disconnect();
      plot.current.destroy();
    };
  }, [theme, height]);
  useEffect(() => plot.current.setData(data), [times, series]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${ref}></div>`;
}
