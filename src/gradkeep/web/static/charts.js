// Lines over an axis, drawn by uPlot in the page's own colours.
import { html, useEffect, useRef } from "./vendor/preact.js";

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const SERIES = ["series-1", "series-2", "series-3", "series-4", "series-5"];

// `data` is [x, y, y ...]; `series` has a label and the name of a colour for each y.
export function Lines({ data, series, x, y, height = 240, marker, hooks, band, title, xValues, yValues, yRange, xRange }) {
  const place = useRef(null);
  useEffect(() => {
    const element = place.current;
    const ink = colour("muted");
    const grid = { stroke: colour("rule"), width: 1 };
    const axis = (label, values, more) => ({ label, labelSize: 18, labelFont: "11px system-ui", font: "11px system-ui", stroke: ink, grid, ticks: grid, values, ...more });
    const options = {
      width: Math.max(240, element.clientWidth),
      height,
      scales: { x: { time: false, range: xRange }, y: { range: yRange } },
      legend: { show: series.length > 1, live: true },
      cursor: { y: false, points: { size: 6 } },
      axes: [axis(x, xValues), axis(y, yValues, { size: 52 })],
      series: [
        { label: x, value: xValues ? (_, value) => (value === null ? "-" : xValues(null, [value])[0]) : undefined },
        ...series.map((one) => ({
          label: one.label,
          stroke: colour(one.colour),
          width: one.width ?? 1.6,
          fill: one.fill ? colour(one.fill) : undefined,
          dash: one.dash,
          paths: one.stepped ? window.uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: one.points ?? true, size: 5 },
          spanGaps: true,
          value: (_, value) => (value === null || value === undefined ? "-" : yValues ? yValues(null, [value])[0] : value.toPrecision(3)),
        })),
      ],
      bands: band,
      hooks: {
        draw: [
          (plot) => {
            if (marker === null || marker === undefined) return;
            const at = plot.valToPos(marker, "x", true);
            plot.ctx.save();
            plot.ctx.strokeStyle = colour("accent");
            plot.ctx.setLineDash([4, 3]);
            plot.ctx.beginPath();
            plot.ctx.moveTo(at, plot.bbox.top);
            plot.ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
            plot.ctx.stroke();
            plot.ctx.restore();
          },
          ...(hooks?.draw ?? []),
        ],
      },
    };
    const plot = new window.uPlot(options, data, element);
    const resized = new ResizeObserver(() => {
      const width = Math.max(240, element.clientWidth);
      if (Math.abs(width - plot.width) > 2) plot.setSize({ width, height });
    });
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify([data, series, marker, height])]);
  return html`<div class="chart" role="img" aria-label=${title} ref=${place}></div>`;
}
