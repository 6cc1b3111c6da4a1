// SPDX-License-Identifier: Apache-2.0

package hostname

import (
	"net"
	"net/url"
)

// Private reports whether nobody is between this process and whoever answers at the URL:
// it is https, or http at localhost or another loopback address.
func Private(u *url.URL) bool {
	if u.Scheme != "http" {
		return u.Scheme == "https"
	}
	host := u.Hostname()
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
