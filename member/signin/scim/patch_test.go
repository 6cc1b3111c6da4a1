// SPDX-License-Identifier: Apache-2.0

package scim_test

import (
	"encoding/json"
	"strings"
	"testing"
)

const userURN = "urn:ietf:params:scim:schemas:core:2.0:User"

// A patch without a path names attributes in every way that the protocol has; what it
// is answered 200 for has been done.
func TestPatchWithoutPath(t *testing.T) {
	s := newService(t)
	doc := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@x.org","active":true,"emails":[{"value":"ann@x.org","type":"work"},{"value":"a@home.org","type":"home"}]}`)
	at := "Users/" + doc["id"].(string)
	send := func(status int, op, value string) map[string]any {
		t.Helper()
		return s.want(status, "PATCH", at, patchOp+`{"op":"`+op+`","value":`+value+`}]}`)
	}
	for _, off := range []string{`{"active":false}`, `{"Active":false}`, `{"` + userURN + `:active":false}`, `{"` + userURN + `":{"active":false}}`, `{"` + userURN + `":{"` + userURN + `:active":"False"}}`, `{"active":"False"}`} {
		for _, op := range []string{"replace", "Add"} {
			send(200, op, `{"active":"True"}`)
			s.is("ann@x.org", "active")
			send(200, op, off)
			if s.is("ann@x.org", "inactive"); t.Failed() {
				t.Fatalf("%s %s", op, off)
			}
		}
	}
	doc = send(200, "replace", `{"name.familyName":"Other","`+userURN+`:name.givenName":"Ann","emails[type eq \"home\"].value":"b@home.org","externalId":"e1","`+userURN+`":{"title":"Dr","name.middleName":"M"}}`)
	name, _ := doc["name"].(map[string]any)
	if name["familyName"] != "Other" || name["givenName"] != "Ann" || name["middleName"] != "M" || doc["title"] != "Dr" || doc["externalId"] != "e1" {
		t.Errorf("patched: %v", doc)
	}
	if b, _ := json.Marshal(doc["emails"]); !strings.Contains(string(b), "b@home.org") || strings.Contains(string(b), "a@home.org") || !strings.Contains(string(b), "ann@x.org") {
		t.Errorf("emails: %s", b)
	}
	for _, bad := range []string{`{"urn:ietf:params:scim:schemas:other:User:active":false}`, `{"enabled":false}`, `{"name.other":"x"}`, `{"` + userURN + `":false}`, `{"` + userURN + `":{"enabled":false}}`,
		`{"active":true,"` + userURN + `:active":false}`, `{"active":false,"Active":true}`, `{"active":true,"` + userURN + `":{"active":false}}`, `{"active":"yes"}`, `{"emails[":"x"}`, `{"meta":{}}`} {
		send(400, "replace", bad)
	}
	s.is("ann@x.org", "inactive")
}

// What would be much work to parse is refused before it is parsed.
func TestPatchIsBounded(t *testing.T) {
	s := newService(t)
	doc := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@x.org"}`)
	at := "Users/" + doc["id"].(string)
	op := `{"op":"replace","value":{"title":"x"}}`
	s.want(200, "PATCH", at, patchOp+strings.Repeat(op+",", 99)+op+`]}`)
	deep := strings.Repeat("(", 600)
	for what, body := range map[string]string{
		"operations":       strings.Repeat(op+",", 100) + op,
		"a path":           `{"op":"replace","path":"emails[` + deep + `","value":"x"}`,
		"a key":            `{"op":"replace","value":{"emails[` + deep + `":"x"}}`,
		"a key of members": `{"op":"replace","value":{"` + userURN + `":{"emails[` + deep + `":"x"}}}`,
	} {
		if code, doc, _ := s.do("PATCH", at, token, patchOp+body+`]}`); code != 413 {
			t.Errorf("%s: %d %v", what, code, doc)
		}
	}
}
