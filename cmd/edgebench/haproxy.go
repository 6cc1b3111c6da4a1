// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"strings"
)

// startHAProxy starts HAProxy with one thread for each core, a map of the tenants,
// connections to the cells that all requests share, and a log into a ring in memory,
// which is the cheapest that it has: no line leaves the process.
func (b *bench) startHAProxy(p *peer) error {
	path, err := installed("haproxy")
	if err != nil {
		return err
	}
	var routes, backends strings.Builder
	for i := range tenants {
		fmt.Fprintf(&routes, "%s %s\n", tenantName(i), cellName(cellOf(i)))
	}
	routeFile, err := b.write("haproxy.map", routes.String())
	if err != nil {
		return err
	}
	proto := ""
	if b.kind == "grpc" {
		proto = " proto h2"
	}
	for i, addr := range b.cellAddrs() {
		fmt.Fprintf(&backends, "backend %s\n  http-reuse always\n  server a %s%s pool-max-conn -1 pool-purge-delay 1h\n", cellName(i), addr, proto)
	}
	bind := fmt.Sprintf("  bind 127.0.0.1:%d%s\n", p.port, proto)
	if p.tls != 0 {
		pem, err := b.pem()
		if err != nil {
			return err
		}
		bind += fmt.Sprintf("  bind 127.0.0.1:%d ssl crt %s ssl-min-ver TLSv1.3 ciphersuites TLS_AES_128_GCM_SHA256 curves X25519 no-tls-tickets\n", p.tls, pem)
	}
	conf := fmt.Sprintf(`global
  nbthread %d
  maxconn 2048
  tune.h2.max-concurrent-streams 1000
  log ring@lines format rfc5424 local0
ring lines
  size 1048576
  maxlen 1024
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  timeout http-keep-alive 1h
  option httplog
  log global
frontend public
%s  http-request set-header X-Forwarded-For %%[src]
  http-request set-header X-Forwarded-Host %%[req.hdr(host)]
  http-request set-header X-Forwarded-Proto http
  http-request set-header Cell-Tenant %%[req.hdr(x-tenant)]
  http-request set-header Cell-Epoch 1
  http-request set-header Cell-Admission %s
  use_backend %%[req.hdr(x-tenant),map_str(%s)]
%s`, b.procsEach, bind, admission, routeFile, backends.String())
	name, err := b.write("haproxy.cfg", conf)
	if err != nil {
		return err
	}
	p.proc, err = b.start("haproxy", path, "-db", "-f", name)
	return err
}
