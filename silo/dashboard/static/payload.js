// Payloads for people: as JSON and text if they are, and always as hexadecimal bytes.

const SHOWN = 16_384;

/** The forms in which a payload (base64) can be shown, the best first. */
export function decode(base64) {
  const payload = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
  const forms = {};
  let text = null;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(payload);
  } catch {
    // Not text.
  }
  if (text !== null) {
    try {
      forms.JSON = cut(JSON.stringify(JSON.parse(text), null, 2));
    } catch {
      // Not JSON.
    }
    forms.Text = cut(text);
  }
  forms.Hex = hex(payload);
  return forms;
}

function hex(payload) {
  const lines = [];
  for (let at = 0; at < Math.min(payload.length, SHOWN); at += 16) {
    const row = [...payload.slice(at, at + 16)];
    const codes = row.map((one) => one.toString(16).padStart(2, "0")).join(" ");
    const plain = row.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${plain}`);
  }
  if (payload.length > SHOWN) lines.push(`… ${payload.length - SHOWN} more bytes`);
  return lines.join("\n");
}

function cut(text) {
  return text.length > SHOWN ? `${text.slice(0, SHOWN)}\n… ${text.length - SHOWN} more characters` : text;
}
