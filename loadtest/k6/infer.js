// k6 run -e URL=http://127.0.0.1:8000 -e MODEL=tiny -e RATE=500 loadtest/k6/infer.js
//
// The variable HEADRACE_API_KEY has the key of a server with keys: with -e all users of the machine could read it. TLS trusts the
// system's authorities, and those of SSL_CERT_FILE; CERT and KEY are the files of a client certificate.
//
// An open load: so many requests a second, whether or not the last ones are answered. request.json beside this file is the body.
import http from 'k6/http';
import { check } from 'k6';

const url = __ENV.URL || 'http://127.0.0.1:8000';
const model = __ENV.MODEL || 'tiny';
const rate = Number(__ENV.RATE || 200);
const seconds = Number(__ENV.SECONDS || 90);
const p99_ms = Number(__ENV.P99_MS || 100);
// Who waits longer than this has gone: the server answers 504, or 503 at once if it knows beforehand.
const deadline_ms = 5 * p99_ms;
const body = open('./request.json');
const key = __ENV.HEADRACE_API_KEY;
const parameters = {
  headers: {
    'Content-Type': 'application/json',
    'X-Request-Timeout-Ms': `${deadline_ms}`,
    ...(key ? { Authorization: `Bearer ${key}` } : {}),
  },
  responseCallback: http.expectedStatuses(200),
};

export const options = {
  tlsAuth: __ENV.CERT ? [{ cert: open(__ENV.CERT), key: open(__ENV.KEY || __ENV.CERT) }] : [],
  scenarios: {
    infer: {
      executor: 'ramping-arrival-rate',
      startRate: Math.ceil(rate / 10),
      timeUnit: '1s',
      // A virtual user is one request at a time: as many are needed as wait at once.
      preAllocatedVUs: Math.ceil((rate * p99_ms) / 1000),
      maxVUs: Math.ceil((rate * deadline_ms) / 1000),
      stages: [
        { target: rate, duration: `${Math.ceil(seconds / 3)}s` },
        { target: rate, duration: `${Math.ceil((2 * seconds) / 3)}s` },
      ],
    },
  },
  thresholds: {
    http_req_failed: ['rate<0.001'],
    http_req_duration: [`p(99)<${p99_ms}`],
    checks: ['rate==1'],
    // What k6 could not send because all its users waited: a load that is not the one asked for proves nothing.
    dropped_iterations: [`rate<${rate / 100}`],
  },
};

export default function () {
  const answer = http.post(`${url}/v2/models/${model}/infer`, body, parameters);
  check(answer, {
    'answered or refused as it should be': (one) => [200, 503, 504].includes(one.status),
    'has its output': (one) => one.status !== 200 || one.json('outputs.0.shape').length > 0,
  });
}
