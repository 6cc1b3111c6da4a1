// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"time"

	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/hold"
)

func holdTime(d time.Duration) edge.Config {
	return edge.Config{Hold: hold.Limits{Time: d}}
}
