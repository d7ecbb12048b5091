// Numbers as people read them.
export function bytes(count) {
  if (count === null || count === undefined) return "-";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = count;
  let unit = 0;
  while (value >= 999.95 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit ? `${value.toFixed(1)} ${units[unit]}` : `${Math.round(value)} B`;
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? "-" : `${(100 * share).toFixed(digits)}%`;
}

// A share with its sign, which is never told by colour alone.
export function signed(share, digits = 1) {
  const value = 100 * share;
  const text = Math.abs(value).toFixed(digits);
  return `${value < 0 ? "\u2212" : "+"}${text}%`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 100000) ? value.toExponential(2) : value.toPrecision(digits);
  return text.replace("-", "\u2212");
}

export function fixed(value, digits = 3) {
  return value === null || value === undefined ? "-" : value.toFixed(digits).replace("-", "\u2212");
}

export function count(value) {
  return value.toLocaleString("en-US");
}

export function when(seconds) {
  if (!seconds) return "-";
  const date = new Date(1000 * seconds);
  return `${date.toISOString().slice(0, 10)} ${date.toISOString().slice(11, 16)} UTC`;
}

export function labelled(value, name) {
  if (value === null || value === undefined) return "-";
  return name !== null && name !== undefined && name !== String(value) ? `${name}` : String(value);
}
