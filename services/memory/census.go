// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"net/http"

	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// Classify sorts requests for the tenancy check. Every call of the API acts in a
// tenant, and a path that is not served is checked, too: what it answers tells
// nothing to who may not ask.
func Classify(*http.Request) checks.Class { return checks.Checked }
