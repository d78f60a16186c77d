// k6 run -e URL=http://127.0.0.1:8000 -e MODEL=tiny -e RATE=500 loadtest/k6/infer.js
//
// An open load: so many requests a second, whether or not the last ones are answered. request.json beside this file is the body.
import http from 'k6/http';
import { check } from 'k6';

const url = __ENV.URL || 'http://127.0.0.1:8000';
const model = __ENV.MODEL || 'tiny';
const rate = Number(__ENV.RATE || 200);
const body = open('./request.json');
const parameters = {
  headers: { 'Content-Type': 'application/json', 'X-Request-Timeout-Ms': '500' },
  // A server that has too much to do says 503 at once; one that would answer too late says 504.
  responseCallback: http.expectedStatuses(200),
};

export const options = {
  scenarios: {
    infer: {
      executor: 'ramping-arrival-rate',
      startRate: rate / 10,
      timeUnit: '1s',
      preAllocatedVUs: 50,
      maxVUs: 500,
      stages: [
        { target: rate, duration: '30s' },
        { target: rate, duration: '60s' },
      ],
    },
  },
  thresholds: {
    http_req_failed: ['rate<0.001'],
    http_req_duration: ['p(99)<100'],
    checks: ['rate==1'],
  },
};

export default function () {
  const answer = http.post(`${url}/v2/models/${model}/infer`, body, parameters);
  check(answer, {
    'answered or refused as it should be': (one) => [200, 503, 504].includes(one.status),
    'has its output': (one) => one.status !== 200 || one.json('outputs.0.shape').length > 0,
  });
}
