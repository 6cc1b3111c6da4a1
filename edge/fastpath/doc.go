// SPDX-License-Identifier: Apache-2.0

// Package fastpath forwards the HTTP/1.1 requests that are common and unambiguous, on
// the bytes that came, and gives every other connection to another server, with the
// bytes that it has read.
//
// # Who is authoritative
//
// [Backend] decides where a request goes, and net/http remains the authority on what a
// request is: this package takes only what net/http, and every server that follows
// RFC 9112, reads in the same one way. Where there is a doubt it takes nothing.
//
// # What is taken
//
// One request at a time of a connection, when its whole head, and its whole body if it
// has one, fit the connection's buffer, and
//
//   - the request line is METHOD SP /path SP HTTP/1.1 with one of the usual methods, of
//     visible ASCII; the path has no escapes, empty or dot segments, parameters or
//     backslashes, and is not one of the platform's own;
//   - every line ends in CRLF, none is folded, names are tokens followed by the colon,
//     values have no control characters;
//   - Host is there once and plain; Content-Length at most once, in digits; Connection is
//     absent, keep-alive or close; nothing else speaks of the connection, of encodings of the
//     transfer, of upgrades or expectations;
//   - the backend knows the tenant, its route is plain, and a process of its cell is
//     reached without TLS.
//
// # States of a connection
//
//	idle --head--> taken --> sent --> answer relayed --> idle
//	  |              |         |
//	  |              |         +--a gate refused it: nothing has run--> handed over, with the request
//	  |              +--no connection to the process--> handed over, with the request
//	  +--anything else: HTTP/2, TLS, odd bytes, a slow or large head--> handed over, as it came
//
// # What happens on each failure
//
//   - The process closes or breaks its connection after the request was sent: the client gets the
//     backend's refusal. The request may have run, and is never sent again.
//   - The answer is malformed (both lengths, bytes behind its end, bad chunks): before its head was
//     passed on as above; afterwards the client's connection is cut, so that no part of it can
//     be taken for another answer.
//   - The client goes while the process works: after a second the process's connection is closed.
//   - The server drains: connections without a request close, others after their answer.
package fastpath
