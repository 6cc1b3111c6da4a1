// SPDX-License-Identifier: Apache-2.0

package web_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/internal/web"
)

func TestDecode(t *testing.T) {
	type inner struct {
		A string `json:"a"`
	}
	type doc struct {
		Tenant string            `json:"tenant"`
		Inner  *inner            `json:"inner"`
		List   []inner           `json:"list"`
		Map    map[string]string `json:"map"`
	}
	for body, want := range map[string]struct{ strict, lax cells.Code }{
		`{"tenant":"a","inner":{"a":"1"},"list":[{"a":"1"},{"a":"1"}],"map":{"x":"1","X":"2"}}`: {},
		`{}`:                             {},
		`{"tenant":"a","other":1}`:       {strict: cells.CodeBadRequest},
		`{"tenant":"a","tenant":"b"}`:    {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"tenant":"a","Tenant":"b"}`:    {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"inner":{"a":"1","a":"2"}}`:    {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"list":[{"a":"1","a":"2"}]}`:   {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"map":{"x":"1","\u0078":"2"}}`: {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"tenant":"a"}{"tenant":"b"}`:   {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"tenant":"a"} x`:               {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"tenant":"a"`:                  {cells.CodeBadRequest, cells.CodeBadRequest},
		``:                               {cells.CodeBadRequest, cells.CodeBadRequest},
		`{"tenant":"` + strings.Repeat("a", 1000) + `"}`: {cells.CodeTooLarge, cells.CodeTooLarge},
	} {
		for strict, code := range map[bool]cells.Code{true: want.strict, false: want.lax} {
			r := httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			got := cells.Code("")
			if err := web.Decode(httptest.NewRecorder(), r, new(doc), 512, strict); err != nil {
				got = cells.AnswerOf(err).Code
			}
			if got != code {
				t.Errorf("%.80s, strict %t: %q, want %q", body, strict, got, code)
			}
		}
	}
}
