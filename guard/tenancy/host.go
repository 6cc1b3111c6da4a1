// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"net"
	"strings"

	"golang.org/x/net/idna"
)

// normalHost brings a URL's host into the one form in which hosts are compared.
func normalHost(hostport string) (string, error) {
	host, port := hostport, ""
	if h, p, err := net.SplitHostPort(hostport); err == nil {
		host, port = h, p
	}
	host = strings.Trim(host, "[]")
	if ip := net.ParseIP(host); ip != nil {
		if host = ip.String(); ip.To4() == nil {
			host = "[" + host + "]"
		}
	} else {
		var err error
		if host, err = idna.Lookup.ToASCII(strings.TrimSuffix(host, ".")); err != nil || host == "" {
			return "", fmt.Errorf("host %q: %w", hostport, err)
		}
	}
	if port != "" && port != "80" && port != "443" {
		host += ":" + port
	}
	return strings.ToLower(host), nil
}
