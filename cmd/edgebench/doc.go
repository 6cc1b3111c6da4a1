// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command edgebench measures what a request costs at the edge, beside nginx, HAProxy
// and a tuned httputil.ReverseProxy that do the equivalent: find the upstream by a
// header among a thousand tenants, set headers, pass the request on over kept
// connections, and log it.
//
// Everything is a process of its own: the backend, each proxy, and the load generator,
// which is the command itself. What counts is the CPU time of the proxy's processes
// between the first and the last request, by the kernel's clock of each process; it
// stands a loaded machine better than wall time does, which is reported beside it. The
// proxies take turns, round by round, in an order that rotates, and medians of the rounds
// are compared.
//
//	edgebench http   HTTP/1.1: 200-byte answers, 64 KiB answers, 1 KiB bodies
//	edgebench grpc   unary calls and server streams over HTTP/2 without TLS
//	edgebench tls    HTTP/1.1 over TLS 1.3: kept connections, and full handshakes
//
// and, started by these, the programs: edgebench backend, grpc-backend, edge, reverseproxy.
//
// The load is a closed loop: each connection sends its next request when it has its
// answer. Every answer is checked; a wrong one ends the measurement. Peers that are not
// installed are an error, unless --peers leaves them out; make nginx and make
// haproxy install them.
//
// It has no state but a temporary folder, which holds the peers' configuration and logs
// and is removed at the end (--keep keeps it).
package main
