// SPDX-License-Identifier: Apache-2.0

package celltable

import (
	"context"

	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/edge/rules"
)

// Deployments returns the table of a directory of deployments. The issuers of a cell are
// those of its current and of its next configuration; one that was not attached has
// none.
func Deployments(r deploy.Reader) Source { return reader{r} }

type reader struct{ from deploy.Reader }

// Table implements [Source].
func (r reader) Table(ctx context.Context) (rules.Table, error) {
	v, err := r.from.Read(ctx)
	if err != nil {
		return rules.Table{}, err
	}
	return FromView(v), nil
}

// FromView returns what the rules need of a view.
func FromView(v deploy.View) rules.Table {
	t := rules.Table{Revision: v.Revision}
	for i := range v.Cells {
		c := &v.Cells[i]
		t.Cells = append(t.Cells, rules.Cell{
			Name: c.Name, Host: c.Host, Aliases: c.Aliases, Upstream: c.Upstream, Issuers: c.Issuers(), First: c.First, State: rules.State(c.State),
		})
	}
	return t
}
