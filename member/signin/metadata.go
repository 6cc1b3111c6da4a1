// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// PathMetadata is where a cell says at its own host at which provider its people sign
// in (RFC 9728).
const PathMetadata = "/.well-known/oauth-protected-resource"

// Metadata is that document. None of it is secret.
type Metadata struct {
	// Resource is the cell's public base URL.
	Resource string `json:"resource"`
	// Servers is the issuer of the cell's provider, alone.
	Servers []string `json:"authorization_servers"`
	// Client is the cell's client there, for people who sign in from a command line.
	Client string `json:"client_id"`
}

// MetadataHandler answers with a cell's document. The error wraps [cells.ErrInvalid]:
// one of the three is missing.
func MetadataHandler(base, issuer, client string) (http.Handler, error) {
	if base == "" || issuer == "" || client == "" {
		return nil, fmt.Errorf("%w: signin: the cell's base URL, its provider and its client are needed", cells.ErrInvalid)
	}
	b, err := json.Marshal(Metadata{strings.TrimRight(base, "/"), []string{issuer}, client})
	if err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(b)
	}), nil
}
