// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"path/filepath"
	"strings"
)

// startNginx starts nginx with one worker for each core, a map of the tenants, kept
// connections to the cells, and a buffered access log.
func (b *bench) startNginx(p *peer) error {
	path, err := installed("nginx")
	if err != nil {
		return err
	}
	var routes, upstreams strings.Builder
	for i := range tenants {
		fmt.Fprintf(&routes, "    %s %s;\n", tenantName(i), cellName(cellOf(i)))
	}
	for i, addr := range b.cellAddrs() {
		fmt.Fprintf(&upstreams, "  upstream %s { server %s; keepalive 256; keepalive_requests 1000000000; keepalive_timeout 1h; }\n", cellName(i), addr)
	}
	listen := fmt.Sprintf("listen 127.0.0.1:%d reuseport;", p.port)
	set, pass, version := "proxy_set_header", "proxy_pass http://$cell;", `proxy_http_version 1.1; proxy_set_header Connection "";`
	if b.kind == "grpc" {
		listen = fmt.Sprintf("listen 127.0.0.1:%d http2 reuseport;", p.port)
		set, pass, version = "grpc_set_header", "grpc_pass grpc://$cell;", ""
	}
	tls := ""
	if p.tls != 0 {
		tls = fmt.Sprintf(`    listen 127.0.0.1:%d ssl reuseport;
    ssl_certificate %s; ssl_certificate_key %s;
    ssl_protocols TLSv1.3; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256; ssl_ecdh_curve X25519;
    ssl_session_tickets off; ssl_session_cache off;
`, p.tls, b.cert, b.key)
	}
	temp := func(name string) string { return filepath.Join(b.dir, "nginx-"+name) }
	conf := fmt.Sprintf(`daemon off;
worker_processes %d;
pid %s;
error_log %s warn;
events { worker_connections 2048; }
http {
  client_body_temp_path %s; proxy_temp_path %s; fastcgi_temp_path %s; uwsgi_temp_path %s; scgi_temp_path %s;
  map_hash_max_size 8192; map_hash_bucket_size 128;
  keepalive_timeout 1h; keepalive_requests 1000000000; http2_max_concurrent_streams 1000;
  log_format line '$remote_addr - [$time_iso8601] "$request" $status $body_bytes_sent $http_x_tenant $upstream_addr $request_time';
  access_log %s line buffer=64k flush=1s;
  map $http_x_tenant $cell {
%s  }
%s  server {
    %s
%s    server_tokens off; tcp_nodelay on; client_max_body_size 0;
    proxy_buffer_size 8k; proxy_buffers 16 16k; proxy_busy_buffers_size 64k; proxy_max_temp_file_size 0; client_body_buffer_size 64k;
    location / {
      %s
      %[15]s Host $host; %[15]s X-Forwarded-For $remote_addr; %[15]s X-Forwarded-Host $host; %[15]s X-Forwarded-Proto $scheme;
      %[15]s Cell-Tenant $http_x_tenant; %[15]s Cell-Epoch 1; %[15]s Cell-Admission %[16]s;
      %[17]s
    }
  }
}
`, b.procsEach, temp("pid"), temp("error.log"), temp("body"), temp("proxy"), temp("fastcgi"), temp("uwsgi"), temp("scgi"),
		filepath.Join(b.dir, "nginx.log"), routes.String(), upstreams.String(), listen, tls, version, set, admission, pass)
	name, err := b.write("nginx.conf", conf)
	if err != nil {
		return err
	}
	p.proc, err = b.start("nginx", path, "-c", name, "-e", temp("error.log"))
	return err
}
