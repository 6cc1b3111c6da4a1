// SPDX-License-Identifier: Apache-2.0

package celltable_test

import (
	"context"
	"errors"
	"reflect"
	"testing"

	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/rules"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

type viewer struct {
	view deploy.View
	err  error
}

func (v viewer) Read(context.Context) (deploy.View, error) { return v.view, v.err }

func TestDeployments(t *testing.T) {
	accepts := func(issuers ...string) *tenancy.Fingerprint {
		f, err := tenancy.Config{PublicBaseURL: "https://app.example.com", DeploymentID: "d", BearerIssuers: issuers}.Fingerprint()
		if err != nil {
			t.Fatal(err)
		}
		return &f
	}
	view := deploy.View{Kind: deploy.Pinned, Revision: 42, Cells: []deploy.Cell{
		{Name: "a", Host: "app.example.com", Aliases: []string{"www.example.com"}, Upstream: "http://a:1", State: deploy.Serving, First: true, Current: accepts("old", "both"), Next: accepts("both", "new")},
		{Name: "b", Host: "b.example.com", State: deploy.Attaching},
	}}
	want := rules.Table{Revision: 42, Cells: []rules.Cell{
		{Name: "a", Host: "app.example.com", Aliases: []string{"www.example.com"}, Upstream: "http://a:1", State: rules.Serving, First: true, Issuers: []string{"both", "new", "old"}},
		{Name: "b", Host: "b.example.com", State: rules.Attaching},
	}}
	got, err := celltable.Deployments(viewer{view: view}).Table(t.Context())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v %v", got, err)
	}
	x, err := rules.NewIndex(own, got)
	if err != nil || len(x.Problems()) != 0 {
		t.Errorf("%v %v", x.Problems(), err)
	}
	down := errors.New("down")
	if _, err := celltable.Deployments(viewer{err: down}).Table(t.Context()); !errors.Is(err, down) {
		t.Error(err)
	}
}
