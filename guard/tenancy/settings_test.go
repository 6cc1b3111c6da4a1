// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func TestSettings(t *testing.T) {
	many := Settings{}
	for i := range MaxSettings {
		many[fmt.Sprint("n", i)] = strings.Repeat("v", MaxSettingValue)
	}
	for _, s := range []Settings{nil, {"drain": ""}, {"cache-for": "5s", "a.b_c": "ü"}, many} {
		if err := s.Validate(); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
	more := Settings{"one-more": ""}
	for k, v := range many {
		more[k] = v
	}
	for _, s := range []Settings{{"": "x"}, {"Drain": "x"}, {"a b": "x"}, {"a": "x\ny"}, {"a": "\x1b[1m"}, {"a": "\xff"}, {"a": strings.Repeat("v", MaxSettingValue+1)}, more} {
		if err := s.Validate(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%v: %v", s, err)
		}
	}
	if got := Names(Settings{"b": "", "a": ""}, nil, Settings{"c": "", "a": "x"}); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("names %v", got)
	}
}
