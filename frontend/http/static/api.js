// Requests to this server: the API key, errors in their own words, streams as events.

const KEY = "depthbatch.api_key"; // of sessionStorage: gone with the tab
const WAIT_MS = 500; // between two looks at a server that is loading

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let asking = null; // the one question that all requests wait for

function askForKey(refused) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const input = document.getElementById("key");
    const note = document.getElementById("key-note");
    note.textContent = refused
      ? "The server did not take that key."
      : "It is kept in this tab alone, until the tab is closed.";
    note.classList.toggle("refused", refused);
    input.value = "";
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.onclose = null;
      dialog.close();
      resolve();
    };
    document.getElementById("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => reject(new Refused(401, "no API key: reload the page to give one"));
    dialog.showModal();
    input.focus();
  }).finally(() => {
    asking = null;
  });
  return asking;
}

function headers(key, body) {
  const own = body === undefined ? {} : { "Content-Type": "application/json" };
  // what is no visible ASCII can be no header; the server would refuse it as any wrong key
  return key && /^[!-~]+$/.test(key) ? { ...own, Authorization: `Bearer ${key}` } : own;
}

async function problem(answer) {
  try {
    return new Refused(answer.status, (await answer.json()).error.message);
  } catch {
    return new Refused(answer.status, `the server answered ${answer.status}`);
  }
}

let keyed = false; // whether the server asks for a key

/** One request; asks for a key until the server takes it. Throws Refused, or AbortError. */
export async function request(path, { body, signal, open = false } = {}) {
  for (;;) {
    if (keyed && !open && sessionStorage.getItem(KEY) === null) await askForKey(false);
    const key = open ? null : sessionStorage.getItem(KEY);
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: headers(key, body),
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store", credentials: "omit", signal,
    });
    if (answer.ok) return answer;
    if (answer.status !== 401) throw await problem(answer);
    if (sessionStorage.getItem(KEY) === key) {
      sessionStorage.removeItem(KEY);
      await askForKey(key !== null);
    } // else another request has got a key meanwhile
  }
}

/** What the page must know before it has a key. */
export async function serverFacts() {
  for (;;) {
    try {
      const facts = await (await request("page/server.json", { open: true })).json();
      keyed = facts.api_key;
      return facts;
    } catch (error) {
      if (error.status !== 503) throw error;
      await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
    }
  }
}

/** The objects of a stream of server-sent events, up to its end. Throws Refused when the stream says that it failed. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(500, event.error.message);
      yield event;
    }
  }
}
