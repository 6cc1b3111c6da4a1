#!/usr/bin/env node
// SPDX-License-Identifier: Apache-2.0
//
// A service in Node behind the guard: versions of values, each with its event. It
// shows all that a service in another language does to live in a cell:
//
//   - it takes Cell-Tenant, Cell-Epoch and Cell-Cell from the request, which the
//     sidecar (or another gate) has admitted;
//   - it calls cell.admit(tenant, epoch, cell) first in each transaction;
//   - it calls cell.emit(type, payload) for an event;
//   - it answers with the header "Cell-Fenced: true" when the database says LT001:
//     nothing was written, and the request may be sent to where the tenant is now.
//
// DATABASE_URL names the database, PORT the port on 127.0.0.1. Only the sidecar may
// reach it: it believes the headers.
'use strict';
const http = require('node:http');
const { Pool } = require('pg');

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 16 });
pool.on('error', () => {}); // an idle connection was lost; the next one is new

const schema = `
CREATE TABLE IF NOT EXISTS memory_versions (
    tenant text NOT NULL, namespace text NOT NULL, key text NOT NULL, version bigint NOT NULL,
    value json NOT NULL, event_seq bigint NOT NULL, epoch bigint NOT NULL, cell text NOT NULL,
    PRIMARY KEY (tenant, namespace, key, version))`;

// answered tells an error that the database reports from a connection that broke.
const answered = (e) => e.severity !== undefined;

// transaction runs fn, commits, and rolls back after an error.
async function transaction(fn) {
  const db = await pool.connect();
  let broken;
  try {
    await db.query('BEGIN');
    const out = await fn(db);
    await db.query('COMMIT');
    return out;
  } catch (e) {
    broken = answered(e) ? undefined : e;
    if (!broken) await db.query('ROLLBACK').catch((r) => { broken = r; });
    throw e;
  } finally {
    db.release(broken);
  }
}

// admitted runs fn in a transaction that has passed the tenant's fence, and holds it.
function admitted(who, fn) {
  return transaction(async (db) => {
    await db.query('SELECT cell.admit($1, $2, $3)', [who.tenant, who.epoch, who.cell]);
    return fn(db);
  });
}

const item = (ref, row) => ({
  namespace: ref.namespace, key: ref.key, version: Number(row.version), value: row.value,
  event_seq: Number(row.event_seq), epoch: Number(row.epoch), cell: row.cell,
});

const set = (who, ref) => admitted(who, async (db) => {
  // The event's number comes first: from here on the tenant's writers take turns.
  const event = await db.query("SELECT cell.emit('memory.set', $1) AS seq", [JSON.stringify({ key: ref.key })]);
  const r = await db.query(
    `INSERT INTO memory_versions (tenant, namespace, key, version, value, event_seq, epoch, cell)
     SELECT $1, $2, $3, coalesce(max(version), 0) + 1, $4, $5, $6, $7
     FROM memory_versions WHERE tenant = $1 AND namespace = $2 AND key = $3
     RETURNING version, value, event_seq, epoch, cell`,
    [who.tenant, ref.namespace, ref.key, JSON.stringify(ref.value), event.rows[0].seq, who.epoch, who.cell]);
  return item(ref, r.rows[0]);
});

const versions = (who, ref, limit) => admitted(who, async (db) => { // reads are checked, too
  const r = await db.query(
    `SELECT version, value, event_seq, epoch, cell FROM memory_versions
     WHERE tenant = $1 AND namespace = $2 AND key = $3 ORDER BY version DESC LIMIT $4`,
    [who.tenant, ref.namespace, ref.key, limit]);
  return r.rows.map((row) => item(ref, row));
});

const calls = {
  '/v1/memory.set': set,
  '/v1/memory.get': async (who, ref) => (await versions(who, ref, 1))[0],
  '/v1/memory.history': async (who, ref) => ({ items: await versions(who, ref, 1000000) }),
};

function answer(res, status, doc, headers = {}) {
  res.writeHead(status, { 'Content-Type': 'application/json', ...headers });
  res.end(JSON.stringify(doc));
}

async function handle(req, res) {
  if (req.method === 'GET' && req.url === '/healthz') {
    await pool.query('SELECT 1');
    return answer(res, 200, { ok: true });
  }
  const call = req.method === 'POST' ? calls[req.url] : undefined;
  if (!call) return answer(res, 404, { code: 'NOT_FOUND' });
  const parts = [];
  for await (const part of req) parts.push(part);
  let ref;
  try {
    ref = JSON.parse(Buffer.concat(parts));
  } catch (e) {
    return answer(res, 400, { code: 'BAD_REQUEST', detail: String(e) });
  }
  const who = { tenant: req.headers['cell-tenant'], epoch: req.headers['cell-epoch'], cell: req.headers['cell-cell'] ?? '' };
  if (!who.tenant || !/^\d+$/.test(who.epoch ?? '')) return answer(res, 400, { code: 'BAD_REQUEST', detail: 'no admission' });
  const out = await call(who, ref);
  return out === undefined ? answer(res, 404, { code: 'NO_SUCH_MEMORY' }) : answer(res, 200, out);
}

const server = http.createServer((req, res) => {
  handle(req, res).catch((e) => {
    if (e.code === 'LT001') return answer(res, 409, { code: 'FENCED', detail: e.message }, { 'Cell-Fenced': 'true' });
    // Where the connection was lost a commit may have been made or not.
    return answer(res, 500, { code: answered(e) ? 'FAILED' : 'OUTCOME_UNKNOWN', detail: String(e) });
  });
});

transaction(async (db) => {
  await db.query('SELECT pg_advisory_xact_lock(4711)'); // several processes may start at once
  await db.query(schema);
}).then(() => server.listen(Number(process.env.PORT), '127.0.0.1'), (e) => {
  console.error(e);
  process.exit(1);
});
