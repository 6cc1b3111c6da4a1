// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"errors"
	"testing"

	scimerrors "github.com/elimity-com/scim/errors"
	"github.com/elimity-com/scim/schema"
)

// What names no attribute is refused here too, whatever the protocol's library lets by.
func TestUnknownKeysAreRefused(t *testing.T) {
	for _, k := range []string{"enabled", "name.other", "urn:x:User:active", schema.UserSchema + ":enabled", "externalId.x", "["} {
		_, err := named(schema.CoreUserSchema(), map[string]any{k: false})
		if e := (scimerrors.ScimError{}); !errors.As(err, &e) || e.ScimType != scimerrors.ScimTypeInvalidPath {
			t.Errorf("%s: %v", k, err)
		}
	}
	if out, err := named(schema.CoreUserSchema(), map[string]any{schema.UserSchema + ":Active": false}); err != nil || len(out) != 1 || out[0].path.AttributePath.AttributeName != "active" {
		t.Errorf("%+v, %v", out, err)
	}
}
