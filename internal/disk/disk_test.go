// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"testing"
)

func TestSpace(t *testing.T) {
	free, total, err := Space(t.TempDir())
	if errors.Is(err, ErrUnknown) {
		t.Skip(err)
	}
	if err != nil || free <= 0 || total < free {
		t.Errorf("%d of %d bytes are free, %v", free, total, err)
	}
	if _, _, err := Space("/no such folder"); err == nil {
		t.Error("the room of a folder that is not there")
	}
}
