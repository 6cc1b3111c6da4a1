// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/elimity-com/scim"
	scimerrors "github.com/elimity-com/scim/errors"
	"github.com/elimity-com/scim/optional"
	"github.com/elimity-com/scim/schema"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

// groups is the resource of groups; the tenant is in the request's context.
type groups struct{ h *Handler }

type tenantKey struct{}

func withTenant(ctx context.Context, t cells.TenantID) context.Context {
	return context.WithValue(ctx, tenantKey{}, t)
}

func tenantOf(r *http.Request) cells.TenantID {
	t, _ := r.Context().Value(tenantKey{}).(cells.TenantID)
	return t
}

func groupOf(t cells.TenantID, attributes map[string]any) (g signin.Group, err error) {
	g.Tenant = t
	g.Name, _ = attributes["displayName"].(string)
	g.External, _ = attributes["externalId"].(string)
	if g.Name == "" || len(g.Name) > 512 {
		bad := scimerrors.ScimErrorInvalidValue
		bad.Detail = "displayName has 1 to 512 bytes"
		return g, bad
	}
	if g.Attributes, err = json.Marshal(attributes); err == nil && len(g.Attributes) > maxAttributes {
		err = scimerrors.ScimErrorInvalidValue
	}
	return g, err
}

func groupResource(g signin.Group) (scim.Resource, map[string]any, error) {
	doc := map[string]any{}
	if err := json.Unmarshal(g.Attributes, &doc); err != nil {
		return scim.Resource{}, nil, fmt.Errorf("group %s cannot be read: %w", g.ID, err)
	}
	r := scim.Resource{ID: g.ID, Attributes: doc, Meta: scim.Meta{Created: &g.Created, LastModified: &g.Changed, Version: fmt.Sprintf(`W/"%d"`, g.Version)}}
	if g.External != "" {
		r.ExternalID = optional.NewString(g.External)
	}
	return r, doc, nil
}

func (s groups) answer(g signin.Group, err error) (scim.Resource, error) {
	if err != nil {
		return scim.Resource{}, err
	}
	r, _, err := groupResource(g)
	return r, err
}

// Create implements scim.ResourceHandler.
func (s groups) Create(r *http.Request, attributes scim.ResourceAttributes) (scim.Resource, error) {
	g, err := groupOf(tenantOf(r), attributes)
	if err == nil {
		g, err = s.h.cfg.Store.CreateGroup(r.Context(), g)
	}
	return s.answer(g, told(r, err, ""))
}

// Get implements scim.ResourceHandler.
func (s groups) Get(r *http.Request, id string) (scim.Resource, error) {
	g, err := s.h.cfg.Store.Group(r.Context(), tenantOf(r), id)
	return s.answer(g, told(r, err, id))
}

// GetAll implements scim.ResourceHandler.
func (s groups) GetAll(r *http.Request, p scim.ListRequestParams) (scim.Page, error) {
	var out pager
	for after := ""; ; {
		list, err := s.h.cfg.Store.Groups(r.Context(), tenantOf(r), after, 500)
		if err != nil {
			return scim.Page{}, told(r, err, "")
		}
		if len(list) == 0 {
			return out.page(), nil
		}
		for _, g := range list {
			res, doc, err := groupResource(g)
			if err != nil {
				return scim.Page{}, told(r, err, g.ID)
			}
			if passes(p, g.ID, g.External, doc) {
				out.add(p, res)
			}
		}
		after = list[len(list)-1].ID
	}
}

// Replace implements scim.ResourceHandler.
func (s groups) Replace(r *http.Request, id string, attributes scim.ResourceAttributes) (scim.Resource, error) {
	return s.change(r, id, func(map[string]any) (map[string]any, error) { return copied(attributes) })
}

// Patch implements scim.ResourceHandler.
func (s groups) Patch(r *http.Request, id string, ops []scim.PatchOperation) (scim.Resource, error) {
	return s.change(r, id, func(doc map[string]any) (map[string]any, error) {
		if err := patch(s.h.group, doc, ops); err != nil {
			return nil, err
		}
		return valid(s.h.group, doc)
	})
}

func (s groups) change(r *http.Request, id string, next func(map[string]any) (map[string]any, error)) (scim.Resource, error) {
	var err error
	for range tries {
		var was, g signin.Group
		if was, err = s.h.cfg.Store.Group(r.Context(), tenantOf(r), id); err != nil {
			break
		}
		var doc map[string]any
		if _, doc, err = groupResource(was); err != nil {
			break
		}
		if was.External != "" {
			doc[schema.CommonAttributeExternalID] = was.External
		}
		if doc, err = next(doc); err != nil {
			break
		}
		if g, err = groupOf(was.Tenant, doc); err != nil {
			break
		}
		g.ID, g.Version = was.ID, was.Version
		if g, err = s.h.cfg.Store.UpdateGroup(r.Context(), g); !errors.Is(err, signin.ErrChanged) {
			return s.answer(g, told(r, err, id))
		}
	}
	return scim.Resource{}, told(r, err, id)
}

// Delete implements scim.ResourceHandler.
func (s groups) Delete(r *http.Request, id string) error {
	return told(r, s.h.cfg.Store.DeleteGroup(r.Context(), tenantOf(r), id), id)
}
