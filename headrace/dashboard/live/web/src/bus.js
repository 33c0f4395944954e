// The broker over WebSocket, in the read-only role `web`: live subjects, and batched direct gets for history.
import { nkeyAuthenticator, wsconnect } from "@nats-io/nats-core";
import { message } from "./codec.js";

export async function open(settings, onStatus) {
  const nc = await wsconnect({
    servers: settings.websocket, name: "dashboard", inboxPrefix: "_INBOX.web", waitOnFirstConnect: true,
    authenticator: nkeyAuthenticator(new TextEncoder().encode(settings.seed)),
    maxReconnectAttempts: -1, reconnectTimeWait: 250, reconnectJitter: 100, pingInterval: 5000, maxPingOut: 2,
  });
  (async () => {
    for await (const status of nc.status()) onStatus(status.type);
  })();
  return nc;
}

export function follow(nc, subject, apply, count) {
  nc.subscribe(subject, {
    callback: (error, msg) => {
      if (error) { count("refused"); console.warn(`${subject}: ${error.message}`); return; }
      try {
        const record = message(msg);
        if (record) apply(record);
        count("read");
      } catch (fault) { count("unreadable"); console.warn(`${msg.subject}: ${fault.message}`); }
    },
  });
}

// Every stored record of a subject from a sequence on, oldest first, in batches of a thousand.
export async function history(nc, stream, subject, from, apply) {
  for (let seq = from, left = 1; left > 0;) {
    const request = JSON.stringify({ batch: 1000, seq, next_by_subj: subject });
    const replies = await nc.requestMany(`$JS.API.DIRECT.GET.${stream}`, request, { strategy: "sentinel", maxWait: 10000, maxMessages: 1001 });
    left = 0;
    for await (const msg of replies) {
      const code = msg.headers?.code ?? 0;
      if (code === 404) return;
      if (code === 204 || msg.data.length === 0) { left = Number(msg.headers?.get("Nats-Num-Pending") ?? 0); break; }
      const at = Number(msg.headers.get("Nats-Sequence"));
      seq = at + 1;
      const record = message(msg);
      if (record) apply(record, at);
    }
  }
}
