// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/cloister-dev/cloister/cells"
)

// ParseURL reads the address of a table:
//
//	etcd://[user@]host:port[,host:port...][/prefix][?option=value...]
//
// Options: tls=true for TLS with the system's roots; ca=FILE for TLS with these
// roots; cert=FILE and key=FILE for a client certificate; server_name=NAME;
// password_file=FILE for the user's password (a password in the URL is taken as
// well, and shows in process lists). The prefix is [DefaultPrefix] if there is
// none. Files are read once. The error wraps [cells.ErrInvalid] and holds no
// password.
func ParseURL(raw string) (clientv3.Config, []Option, error) {
	fail := func(format string, args ...any) (clientv3.Config, []Option, error) {
		return clientv3.Config{}, nil, fmt.Errorf("%w: etcd url: %s", cells.ErrInvalid, fmt.Sprintf(format, args...))
	}
	// The hosts are taken out first: a list of them is no host to the parser.
	rest, ok := strings.CutPrefix(raw, "etcd://")
	if !ok {
		return fail("does not begin with etcd://")
	}
	authority, tail := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority, tail = rest[:i], rest[i:]
	}
	userinfo, hosts := "", authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		userinfo, hosts = authority[:i+1], authority[i+1:]
	}
	u, err := url.Parse("etcd://" + userinfo + "host" + tail)
	if err != nil || u.Fragment != "" {
		return fail("is malformed")
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("options are malformed")
	}
	var cfg clientv3.Config
	for host := range strings.SplitSeq(hosts, ",") {
		if h, p, err := net.SplitHostPort(host); err != nil || h == "" || p == "" {
			return fail("%q is not host:port", host)
		}
	}
	cfg.Username = u.User.Username()
	cfg.Password, _ = u.User.Password()
	var opts []Option
	if p := strings.Trim(u.Path, "/"); p != "" {
		opts = append(opts, WithPrefix("/"+p+"/"))
	}
	files := map[string]string{}
	var secure, useTLS bool
	for name, values := range q {
		if len(values) != 1 || values[0] == "" {
			return fail("option %q is empty or repeated", name)
		}
		switch name {
		case "tls":
			if values[0] != "true" && values[0] != "false" {
				return fail("tls is true or false")
			}
			secure, useTLS = true, values[0] == "true"
		case "ca", "cert", "key", "password_file", "server_name":
			files[name] = values[0]
		default:
			return fail("option %q is unknown", name)
		}
	}
	wantTLS := files["ca"] != "" || files["cert"] != "" || files["key"] != "" || files["server_name"] != ""
	if secure && !useTLS && wantTLS {
		return fail("tls=false does not go with files for TLS")
	}
	if useTLS || wantTLS {
		if cfg.TLS, err = tlsConfig(files); err != nil {
			return clientv3.Config{}, nil, err
		}
	}
	scheme := "http://"
	if cfg.TLS != nil {
		scheme = "https://"
	}
	for host := range strings.SplitSeq(hosts, ",") {
		cfg.Endpoints = append(cfg.Endpoints, scheme+host)
	}
	if f := files["password_file"]; f != "" {
		b, err := os.ReadFile(f)
		if err != nil {
			return fail("password_file: %v", err)
		}
		cfg.Password = strings.TrimRight(string(b), "\r\n")
	}
	if (cfg.Username == "") != (cfg.Password == "") {
		return fail("a user needs a password, and a password a user")
	}
	return cfg, opts, nil
}

func tlsConfig(files map[string]string) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: files["server_name"]}
	if f := files["ca"]; f != "" {
		pem, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("%w: etcd url: ca: %v", cells.ErrInvalid, err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: etcd url: ca: no certificate in %s", cells.ErrInvalid, f)
		}
	}
	if files["cert"] != "" || files["key"] != "" {
		pair, err := tls.LoadX509KeyPair(files["cert"], files["key"])
		if err != nil {
			return nil, fmt.Errorf("%w: etcd url: client certificate: %v", cells.ErrInvalid, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}
