// Numbers, times and bytes for people. Unknown values are a dash, never 0.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const UNKNOWN = "–";

export function number(value) {
  return value === null || value === undefined ? UNKNOWN : whole.format(value);
}

export function compact(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value < 10_000 ? whole.format(Math.round(value)) : short.format(value);
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return `${value > 0 && value < 10 ? value.toFixed(1) : compact(value)}/s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return UNKNOWN;
  if (ms === 0) return "0 s";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export function time(us) {
  const at = new Date(us / 1000);
  return Number.isNaN(at.getTime()) ? UNKNOWN : at.toISOString().replace("T", " ").slice(0, 19);
}

export function clock(us) {
  return new Date(us / 1000).toTimeString().slice(0, 8);
}

export function counted(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function streamName(stream) {
  return `${stream.namespace}/${stream.key}`;
}

/** A stream as commands and addresses take it: special characters are percent-encoded. */
export function streamText(stream) {
  return `${encodeURIComponent(stream.namespace)}/${encodeURIComponent(stream.key)}`;
}
