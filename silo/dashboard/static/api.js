// Calls of the silo.

export class Refused extends Error {
  constructor({ code, error }) {
    super(error);
    this.code = code;
  }
}

export async function read(path, options) {
  return answered(fetch(`api/${path}?${new URLSearchParams(options)}`));
}

/** The header keeps other sites from sending this request. */
export async function post(path, content) {
  return answered(fetch(`api/${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-headrace": "1" },
    body: JSON.stringify(content),
  }));
}

async function answered(asked) {
  let response;
  try {
    response = await asked;
  } catch {
    throw new Refused({ code: "unreachable", error: "The silo does not answer. It is tried again." });
  }
  let content;
  try {
    content = await response.json();
  } catch {
    throw new Refused({ code: "broken", error: `The silo answered ${response.status} ${response.statusText}.` });
  }
  if (!response.ok) throw new Refused(content);
  return content;
}
