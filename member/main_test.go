// SPDX-License-Identifier: Apache-2.0

package member

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	runIfProcess()
	goleak.VerifyTestMain(m)
}
