// Live records from the broker over WebSocket, in the role `web`, which publishes nothing.
import { nkeyAuthenticator, wsconnect } from "@nats-io/nats-core";
import { message } from "./codec.js";

export async function open(settings, onStatus) {
  const nc = await wsconnect({
    servers: settings.websocket, name: "dashboard", waitOnFirstConnect: true,
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
