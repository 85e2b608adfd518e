"""The name of every table and figure of the three papers, in the order of their pages."""

H2O = (
    "h2o_fig1", "h2o_fig2", "h2o_fig3", "h2o_fig4", "h2o_table1", "h2o_table2", "h2o_table3", "h2o_table4",
    "h2o_table5", "h2o_table6", "h2o_table7", "h2o_table8", "h2o_fig5", "h2o_fig6", "h2o_fig7", "h2o_fig8", "h2o_fig9",
    "h2o_fig10", "h2o_table9",
)  # fmt: skip
ROCO = (
    "roco_fig1", "roco_fig2", "roco_fig3", "roco_fig4", "roco_table1", "roco_table2", "roco_table3", "roco_table4",
    "roco_table5", "roco_fig5", "roco_table6", "roco_table9", "roco_table7", "roco_table8", "roco_fig6",
)  # fmt: skip
INFINIGEN = (
    "infinigen_fig2", "infinigen_fig3", "infinigen_fig4", "infinigen_fig5", "infinigen_fig6", "infinigen_fig7",
    "infinigen_table1", "infinigen_fig8", "infinigen_fig9", "infinigen_fig10", "infinigen_fig11", "infinigen_fig12",
    "infinigen_table2", "infinigen_fig13", "infinigen_fig14", "infinigen_fig15", "infinigen_fig16", "infinigen_fig17",
    "infinigen_fig18", "infinigen_fig19", "infinigen_fig20",
)  # fmt: skip
#: Paper -> its entries. `experiments.papers.registry` has exactly these.
PAPERS = {
    "H2O (arXiv:2306.14048, v1)": H2O,
    "RoCo (arXiv:2402.06262)": ROCO,
    "InfiniGen (arXiv:2406.19707)": INFINIGEN,
}
NAMES = (*H2O, *ROCO, *INFINIGEN)
