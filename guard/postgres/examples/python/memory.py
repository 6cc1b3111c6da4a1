#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A service in Python behind the guard: versions of values, each with its event.

It shows all that a service in another language does to live in a cell:

  * it takes Cell-Tenant, Cell-Epoch and Cell-Cell from the request, which the
    sidecar (or another gate) has admitted;
  * it calls cell.admit(tenant, epoch, cell) first in each transaction;
  * it calls cell.emit(type, payload) for an event;
  * it answers with the header "Cell-Fenced: true" when the database says LT001:
    nothing was written, and the request may be sent to where the tenant is now.

DATABASE_URL names the database, PORT the port on 127.0.0.1. Only the sidecar may
reach it: it believes the headers.
"""
import contextlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg2
import psycopg2.pool

SCHEMA = """
CREATE TABLE IF NOT EXISTS memory_versions (
    tenant text NOT NULL, namespace text NOT NULL, key text NOT NULL, version bigint NOT NULL,
    value json NOT NULL, event_seq bigint NOT NULL, epoch bigint NOT NULL, cell text NOT NULL,
    PRIMARY KEY (tenant, namespace, key, version))"""

FIELDS = ("version", "value", "event_seq", "epoch", "cell")
CONNECTIONS = 16

pool = psycopg2.pool.ThreadedConnectionPool(1, CONNECTIONS, os.environ["DATABASE_URL"])
slots = threading.BoundedSemaphore(CONNECTIONS)  # the pool fails when it is empty


class Fenced(Exception):
    """The tenant is not written here at that epoch; nothing was written."""


@contextlib.contextmanager
def transaction():
    """A transaction, committed at the end, rolled back after an exception."""
    with slots:
        conn = pool.getconn()
        try:
            with conn, conn.cursor() as cur:
                yield cur
        except psycopg2.Error as e:
            if e.pgcode == "LT001":
                raise Fenced(str(e).splitlines()[0]) from e
            raise
        finally:
            pool.putconn(conn, close=bool(conn.closed))


@contextlib.contextmanager
def admitted(who):
    """A transaction that has passed the tenant's fence, and holds it."""
    with transaction() as cur:
        cur.execute("SELECT cell.admit(%s, %s, %s)", (who["tenant"], who["epoch"], who["cell"]))
        yield cur


def item(ref, row):
    return {"namespace": ref["namespace"], "key": ref["key"], **dict(zip(FIELDS, row))}


def set_(who, ref):
    with admitted(who) as cur:
        # The event's number comes first: from here on the tenant's writers take turns.
        cur.execute("SELECT cell.emit('memory.set', %s)", (json.dumps({"key": ref["key"]}),))
        seq = cur.fetchone()[0]
        cur.execute(
            """INSERT INTO memory_versions (tenant, namespace, key, version, value, event_seq, epoch, cell)
               SELECT %(tenant)s, %(namespace)s, %(key)s, coalesce(max(version), 0) + 1, %(value)s, %(seq)s, %(epoch)s, %(cell)s
               FROM memory_versions WHERE tenant = %(tenant)s AND namespace = %(namespace)s AND key = %(key)s
               RETURNING version, value, event_seq, epoch, cell""",
            {**who, "namespace": ref["namespace"], "key": ref["key"], "value": json.dumps(ref["value"]), "seq": seq})
        return item(ref, cur.fetchone())


def get(who, ref):
    found = versions(who, ref, 1)
    return found[0] if found else None


def history(who, ref):
    return {"items": versions(who, ref, 1000000)}


def versions(who, ref, limit):
    with admitted(who) as cur:  # reads are checked, too
        cur.execute(
            """SELECT version, value, event_seq, epoch, cell FROM memory_versions
               WHERE tenant = %s AND namespace = %s AND key = %s ORDER BY version DESC LIMIT %s""",
            (who["tenant"], ref["namespace"], ref["key"], limit))
        return [item(ref, row) for row in cur.fetchall()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path != "/healthz":
            return self.answer(404, {"code": "NOT_FOUND"})
        try:
            with transaction() as cur:
                cur.execute("SELECT 1")
            self.answer(200, {"ok": True})
        except psycopg2.Error as e:
            self.answer(503, {"code": "UNAVAILABLE", "detail": str(e)})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        call = {"/v1/memory.set": set_, "/v1/memory.get": get, "/v1/memory.history": history}.get(self.path)
        if call is None:
            return self.answer(404, {"code": "NOT_FOUND"})
        try:
            who = {"tenant": self.headers["Cell-Tenant"], "epoch": int(self.headers["Cell-Epoch"]),
                   "cell": self.headers.get("Cell-Cell", "")}
            out = call(who, json.loads(body))
        except Fenced as e:
            return self.answer(409, {"code": "FENCED", "detail": str(e)}, {"Cell-Fenced": "true"})
        except (KeyError, TypeError, ValueError) as e:
            return self.answer(400, {"code": "BAD_REQUEST", "detail": repr(e)})
        except psycopg2.Error as e:
            # Without a code the connection was lost: a commit may have been made or not.
            return self.answer(500, {"code": "FAILED" if e.pgcode else "OUTCOME_UNKNOWN", "detail": str(e)})
        if out is None:
            return self.answer(404, {"code": "NO_SUCH_MEMORY"})
        self.answer(200, out)

    def answer(self, status, doc, headers={}):
        body = json.dumps(doc).encode()
        self.send_response(status)
        for k, v in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(k, v)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    with transaction() as cur:
        cur.execute("SELECT pg_advisory_xact_lock(4711)")  # several processes may start at once
        cur.execute(SCHEMA)
    Server(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
